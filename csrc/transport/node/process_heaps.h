#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "transport/node/own_heap.h"

namespace ours {

/// What a process sees of another one's heap. What a forked child writes there stays the child's own.
class PeerHeap final : private SharedWithOthers {
 public:
  /// Throws SystemError or Error if it cannot be mapped.
  explicit PeerHeap(const HeapPlace& place);
  PeerHeap(const PeerHeap&) = delete;
  PeerHeap& operator=(const PeerHeap&) = delete;
  ~PeerHeap();

  std::byte* at(uint64_t offset) const { return file_.data() + offset; }

 private:
  void keep_to_oneself() noexcept override;

  const HeapFile file_;
};

/// The heaps that a process has and sees, one for each process and not for each group: a tensor is in the heap of all
/// groups of its node, and groups cost no descriptors. A heap lasts as long as somebody uses it.
class ProcessHeaps {
 public:
  /// A heap that has lost more than `most_lost` bytes of addresses serves no new groups.
  explicit ProcessHeaps(size_t most_lost = HeapFile::kBytes / 4) : most_lost_(most_lost) {}

  /// Those of this process.
  static std::shared_ptr<ProcessHeaps> here();

  /// This process's heap, or null if it has none.
  std::shared_ptr<OwnHeap> own() const;

  /// This process's heap, which is made if there is none, or if it has lost too much. Throws SystemError.
  std::shared_ptr<OwnHeap> make_own();

  /// The heap of another process. Throws SystemError or Error if it cannot be mapped.
  std::shared_ptr<PeerHeap> peer(const HeapPlace& place);

 private:
  const size_t most_lost_;
  mutable std::mutex mutex_;  // guards all below
  std::weak_ptr<OwnHeap> own_;
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<PeerHeap>> peers_;  // by device and inode
};

}  // namespace ours
