#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/node/process_heaps.h"

namespace ours {

/// A group's view of the heaps of its node's processes, which a rank shows to the others when it first uses its own.
/// Safe to use from any thread.
class NodeHeap {
 public:
  static constexpr uint64_t kNowhere = OwnHeap::kNowhere;

  /// `places` are in memory that the ranks share, by rank: where each of them shows its heap.
  NodeHeap(int rank, std::vector<HeapPlace*> places, std::shared_ptr<ProcessHeaps> heaps);

  /// Returns `bytes` of zeroed memory in this process's heap, aligned to a page. It may outlive the group. Throws
  /// SystemError if there is no memory, or not enough addresses for the heaps of all ranks.
  std::shared_ptr<void> allocate(size_t bytes);

  /// Where [data, data + bytes) lies in this process's heap; kNowhere if it does not lie there as a whole. Peers find
  /// it there after the next synchronisation.
  uint64_t offset_of(const void* data, size_t bytes);

  /// See OwnHeap::withdraw().
  void withdraw(uint64_t offset, size_t bytes) noexcept;

  /// How often that has been called for this process's heap, by any group.
  uint64_t withdrawals();

  /// The address here of an offset in `rank`'s heap, which has shown it. Throws SystemError if it cannot be mapped.
  std::byte* at(int rank, uint64_t offset);

  /// Bytes that this group has given out.
  size_t bytes_in_use() const { return in_use_->load(std::memory_order_relaxed); }

 private:
  /// Shows `heap`. Throws SystemError unless the heaps of all ranks could be mapped: an error here does no harm; one in
  /// the middle of a reduction would.
  void show(std::shared_ptr<OwnHeap> heap);

  const int rank_;
  const std::vector<HeapPlace*> places_;
  const std::shared_ptr<ProcessHeaps> heaps_;
  const std::shared_ptr<std::atomic<size_t>> in_use_ = std::make_shared<std::atomic<size_t>>(0);
  std::mutex mutex_;                              // guards all below
  std::shared_ptr<OwnHeap> own_;                  // the one that was shown
  std::vector<std::shared_ptr<PeerHeap>> peers_;  // by rank, as far as they have been mapped
};

}  // namespace ours
