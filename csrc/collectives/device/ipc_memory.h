#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "common/owning_process.h"
#include "common/shared_memory.h"
#include "device/device.h"

namespace ours {

/// A counter for each rank of a node, in memory that all of them share: how many calls the rank has finished, or that
/// it has let go of its peers' memory, which it never uses again. To give memory back to the device while a peer has
/// it mapped is undefined behaviour, and the end of a group does not wait for its peers; from this board a rank learns
/// later that all have let go. A rank that has died never does, and its peers keep their memory until they end.
class LetGoBoard {
 public:
  /// Makes the board; called on one rank.
  static std::shared_ptr<LetGoBoard> create(int ranks);
  /// Opens the board at the creator's path(), on the other ranks. Throws SystemError.
  static std::shared_ptr<LetGoBoard> open(const std::string& path, int ranks);

  LetGoBoard(std::shared_ptr<SharedMemory> memory, int ranks) : memory_(std::move(memory)), ranks_(ranks) {}

  /// What other processes of this node and user pass to open().
  std::string path() const;

  /// Rank `rank` has finished one more call, and does not use peers' memory for it any more.
  void finish_call(int rank) noexcept { of(rank).fetch_add(1, std::memory_order_release); }
  /// Rank `rank` has no memory of a peer mapped, and never will again.
  void let_go(int rank) noexcept { of(rank).store(kHasLetGo, std::memory_order_release); }

  /// Whether all other ranks have finished as many calls as `rank`, or have let go.
  bool have_peers_finished(int rank) const noexcept { return least_of_peers(rank) >= of(rank).load(); }
  /// Whether all other ranks have let go.
  bool have_peers_let_go(int rank) const noexcept { return least_of_peers(rank) == kHasLetGo; }

 private:
  using Counter = std::atomic<uint64_t>;
  static_assert(Counter::is_always_lock_free);
  static constexpr uint64_t kHasLetGo = UINT64_MAX;

  static size_t bytes_for(int ranks) { return static_cast<size_t>(ranks) * sizeof(Counter); }
  Counter& of(int rank) const { return reinterpret_cast<Counter*>(memory_->data())[rank]; }
  uint64_t least_of_peers(int rank) const noexcept;

  const std::shared_ptr<SharedMemory> memory_;
  const int ranks_;
};

/// The memory of a group whose ranks map each other's. Each rank has a stage in the memory of its device; all ranks map
/// all stages when the group is made, and unmap them when this is destroyed, on a thread of its own (see end_aside()).
/// The rank's own stage is then released as soon as all peers have unmapped it. This rank's device must have done all
/// work that uses any of it.
class IpcMemory {
 public:
  /// All ranks of `host` call this at the same time, with the same `stage_bytes`. `call` is under way.
  static std::shared_ptr<IpcMemory> share(Group& host, const std::shared_ptr<Device>& device, const Call& call,
                                          size_t stage_bytes);

  IpcMemory(int rank, size_t stage_bytes) : rank_(rank), stage_bytes_(stage_bytes) {}
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;
  ~IpcMemory();

  /// Empty if all ranks have mapped the stages of all; otherwise the reason, the same on all ranks, and nothing else
  /// here may be used. What the devices say of reaching each other is not enough: containers, for example, may keep
  /// processes from each other's memory.
  const std::string& why_not() const { return why_not_; }

  /// Device::identity() of each rank's device.
  const std::vector<std::string>& identities() const { return identities_; }
  size_t stage_bytes() const { return stage_bytes_; }
  std::byte* stage(int rank) const { return static_cast<std::byte*>(stages_[static_cast<size_t>(rank)].get()); }

  /// This rank has finished one more call, and does not use peers' stages for it any more.
  void finish_call() noexcept { board_->finish_call(rank_); }
  /// Whether all peers have finished as many calls as this rank.
  bool have_peers_finished() const noexcept { return board_->have_peers_finished(rank_); }

 private:
  void make_and_map(Group& host, Device& device, const Call& call);

  const int rank_;
  const size_t stage_bytes_;
  const OwningProcess owner_;
  std::string why_not_;
  std::vector<std::string> identities_;
  std::shared_ptr<LetGoBoard> board_;
  std::shared_ptr<void> own_;
  std::vector<std::shared_ptr<void>> stages_;  ///< by rank
};

}  // namespace ours
