#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "common/owning_process.h"
#include "reducer/lending_allocator.h"

namespace ours {

/// Lets autograd compute gradients in memory that the backend reduces without copies, and keeps that memory from one
/// backward to the next, so that its pages are not taken from the system and returned in every step.
///
/// Autograd takes the memory of a gradient from the CPU allocator, like that of any tensor. While a GradientMemory is
/// open, tensors of the thread that opened it get memory from here if they have the size of one of its gradients. A
/// tensor that happens to have that size does no harm, as its memory returns here when it is freed. When there are as
/// many such tensors as gradients, further ones get ordinary memory; so do tensors of other threads and of forked
/// children, and all tensors while nothing is open.
class GradientMemory final : public Lender, public std::enable_shared_from_this<GradientMemory> {
 public:
  /// Makes memory from `source` for gradients of `sizes` bytes, one entry for each, and at most `most_spare_bytes` more
  /// for tensors that come and go between them. The first call in a process changes the process's CPU allocator.
  static std::shared_ptr<GradientMemory> create(std::shared_ptr<c10::Allocator> source,
                                                const std::vector<size_t>& sizes, size_t most_spare_bytes);

  /// Opens it for the calling thread, until any thread calls close().
  void open();
  void close();
  /// Closes it for good, and returns the memory that no tensor uses.
  void release();

  bool serves(size_t bytes) const override { return blocks_.count(bytes) != 0; }
  c10::DataPtr lend(size_t bytes) override;
  void take_back(c10::DataPtr block, size_t bytes) override;
  bool has_ended() const override { return !open_; }

 private:
  /// The blocks of one size.
  struct Blocks {
    size_t gradients = 0;            ///< how many gradients have that size
    size_t all = 0;                  ///< blocks that were taken from the source
    size_t lent = 0;                 ///< those that tensors have
    size_t lent_before = 0;          ///< how many they had when it was opened
    std::vector<c10::DataPtr> kept;  ///< those that no tensor has
  };

  GradientMemory(std::shared_ptr<c10::Allocator> source, const std::vector<size_t>& sizes, size_t most_spare_bytes);
  bool may_lend(const Blocks& blocks, size_t bytes) const;
  /// Counts a block as gone.
  void forget(Blocks& blocks, size_t bytes);

  const std::shared_ptr<c10::Allocator> source_;
  const size_t most_spare_bytes_;
  const OwningProcess owner_;
  bool open_ = false;
  bool released_ = false;
  size_t spare_bytes_ = 0;           ///< bytes of the blocks beyond the number of gradients
  std::map<size_t, Blocks> blocks_;  ///< by their size in bytes; the sizes never change
};

}  // namespace ours
