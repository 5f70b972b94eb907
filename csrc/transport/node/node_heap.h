#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/node/process_heaps.h"

namespace ours {

/// Where a rank shows its heap to the others, in memory that they share.
struct ShownHeap {
  HeapPlace place;
  std::atomic<bool> shown;  ///< the place is there to be read
};

/// A group's view of the heaps of its node's processes. Safe to use from any thread.
class NodeHeap {
 public:
  static constexpr uint64_t kNowhere = OwnHeap::kNowhere;

  /// `shown` are the ranks' places, by rank.
  NodeHeap(int rank, std::vector<ShownHeap*> shown, std::shared_ptr<ProcessHeaps> heaps);

  /// Whether this process can have a heap.
  bool allocates();

  /// Returns `bytes` of zeroed memory in this process's heap, aligned to a page, or null if it can have none. The
  /// memory may outlive the group. Throws SystemError if there is none left.
  std::shared_ptr<void> allocate(size_t bytes);

  /// Where [data, data + bytes) lies in this process's heap; kNowhere if it does not lie there as a whole.
  uint64_t offset_of(const void* data, size_t bytes);

  /// The same for an operation in which peers use the memory, until release(). Besides, kNowhere while another group
  /// uses the memory, and until this rank sees the heaps of all others: the first operations of a group may have to do
  /// without.
  uint64_t claim(const void* data, size_t bytes);
  void release() noexcept;

  /// See OwnHeap::withdraw().
  void withdraw(uint64_t offset, size_t bytes) noexcept;

  /// The address here of an offset in `rank`'s heap, which has shown it. Throws SystemError if it cannot be mapped,
  /// unless claim() has found that it can.
  std::byte* at(int rank, uint64_t offset);

  /// Bytes that this group has given out, in whole pages.
  size_t bytes_in_use() const { return in_use_->load(std::memory_order_relaxed); }

 private:
  /// Those below need the mutex.
  bool make_own();
  void show(std::shared_ptr<OwnHeap> heap);
  bool sees_all();

  const int rank_;
  const std::vector<ShownHeap*> shown_;
  const std::shared_ptr<ProcessHeaps> heaps_;
  const std::shared_ptr<std::atomic<size_t>> in_use_ = std::make_shared<std::atomic<size_t>>(0);
  std::mutex mutex_;                              // guards all below
  bool refused_ = false;                          // no heap could be made here
  bool blind_ = false;                            // that of a peer could not be mapped
  std::shared_ptr<OwnHeap> own_;                  // the one that was shown
  std::vector<std::shared_ptr<PeerHeap>> peers_;  // by rank, as far as they have been mapped
  size_t seen_ = 0;                               // the first ranks' heaps that have been mapped
  std::vector<uint64_t> claimed_;
};

}  // namespace ours
