#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "common/owning_process.h"

namespace ours {

/// Lets autograd compute gradients in memory that the backend reduces without copies, and keeps that memory from one
/// backward to the next, so that its pages are not taken from the system and returned in every step.
///
/// Autograd takes a gradient's memory from the CPU allocator like any other's. While a GradientMemory is open, tensors
/// of the thread that opened it which have the size of one of its gradients get memory from here. Others that happen to
/// have that size do no harm: memory is memory, and returns here when it is freed. Once the gradients' number is out,
/// further tensors get ordinary memory, as they do in other threads, in forked children and while nothing is open.
class GradientMemory : public std::enable_shared_from_this<GradientMemory> {
 public:
  /// For gradients of `sizes` bytes, one entry each, in memory of `source`. For tensors that come and go between them
  /// it keeps at most `most_spare_bytes` more. The first call in a process puts itself before the process's CPU
  /// allocator.
  static std::shared_ptr<GradientMemory> create(std::shared_ptr<c10::Allocator> source,
                                                const std::vector<size_t>& sizes, size_t most_spare_bytes);

  /// For the calling thread, until close() is called in any.
  void open();
  void close();
  /// Closes it for good, and returns the memory that no tensor has.
  void release();

 private:
  friend class GradientAllocator;

  /// The blocks of one size.
  struct Blocks {
    size_t gradients = 0;            ///< how many gradients have that size
    size_t all = 0;                  ///< blocks
    size_t lent = 0;                 ///< blocks that tensors have
    size_t lent_before = 0;          ///< as many as they had when it was opened
    std::vector<c10::DataPtr> kept;  ///< blocks that no tensor has
  };

  GradientMemory(std::shared_ptr<c10::Allocator> source, const std::vector<size_t>& sizes, size_t most_spare_bytes);
  bool serves(size_t bytes) const { return blocks_.count(bytes) != 0; }
  bool may_lend(const Blocks& blocks, size_t bytes) const;
  /// Counts a block out that is not kept.
  void forget(Blocks& blocks, size_t bytes);

  const std::shared_ptr<c10::Allocator> source_;
  const size_t most_spare_bytes_;
  const OwningProcess owner_;
  bool open_ = false;
  bool released_ = false;
  size_t spare_bytes_ = 0;           ///< of the blocks beyond the gradients' number
  std::map<size_t, Blocks> blocks_;  ///< by their size in bytes; no entries come or go
};

}  // namespace ours
