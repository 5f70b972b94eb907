#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <memory>
#include <mutex>

namespace ours {

// An allocator in the place of the process's CPU allocator, which the first of the calls below installs. A tensor gets
// memory from the first of these that has some: what lends in its thread, the heap that its thread shares, and the
// allocator before.

/// Lends memory to tensors, which returns when they are freed, on any thread.
class Lender {
 public:
  virtual ~Lender() = default;
  /// Whether there is memory for tensors of that size.
  virtual bool serves(size_t bytes) const = 0;
  /// Returns memory for a tensor of a size that it serves, or null if none is left to lend.
  virtual c10::DataPtr lend(size_t bytes) = 0;
  virtual void take_back(c10::DataPtr block, size_t bytes) = 0;
  /// Whether it lends nothing until it begins again. Called with lending_mutex().
  virtual bool has_ended() const = 0;
};

/// Guards the books of all loans. Lenders may use it for what they count.
std::mutex& lending_mutex();

/// Makes sure that the allocator is installed.
void install_lending_allocator();
/// Lets it lend to tensors of the calling thread, before all others, until end_lending() here or has_ended().
void begin_lending(const std::shared_ptr<Lender>& lender);
void end_lending(const Lender& lender);

/// From now on, tensors of at least that many bytes that this thread makes get memory from `heap`. May be nested: the
/// innermost holds.
void begin_sharing_tensors(std::shared_ptr<c10::Allocator> heap, size_t least);
/// Ends what this thread has begun last. Throws Error if there is nothing. Tensors keep their memory.
void end_sharing_tensors();

}  // namespace ours
