#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "collectives/device/let_go_board.h"
#include "collectives/group.h"
#include "common/owning_process.h"
#include "device/device.h"

namespace ours {

/// The memory of a group whose ranks map each other's. Each rank has a stage in the memory of its device; all ranks map
/// all stages when the group is made, and unmap them when this is destroyed, on a thread of its own (see end_aside()).
/// The rank's own stage is then released as soon as all peers have unmapped it. This rank's device must have done all
/// work that uses any of it.
class IpcMemory {
 public:
  /// All ranks of `host` call this at the same time, with the same `stage_bytes`; a rank whose device lacks room for
  /// that gets a smaller stage. `call` is under way.
  static std::shared_ptr<IpcMemory> share(Group& host, const std::shared_ptr<Device>& device, const Call& call,
                                          size_t stage_bytes);

  explicit IpcMemory(int rank) : rank_(rank) {}
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;
  ~IpcMemory();

  /// Empty if all ranks have mapped the stages of all; otherwise the reason, the same on all ranks, and nothing else
  /// here may be used. What the devices say of reaching each other is not enough: containers, for example, may keep
  /// processes from each other's memory.
  const std::string& why_not() const { return why_not_; }

  /// Device::identity() of each rank's device.
  const std::vector<std::string>& identities() const { return identities_; }
  /// Every rank's stage has at least this many, the same on all ranks.
  size_t stage_bytes() const { return stage_bytes_; }
  std::byte* stage(int rank) const { return static_cast<std::byte*>(stages_[static_cast<size_t>(rank)].get()); }

  /// This rank has finished one more call, and does not use peers' stages for it any more.
  void finish_call() noexcept { board_->finish_call(rank_); }
  /// Whether all peers have finished as many calls as this rank.
  bool have_peers_finished() const noexcept { return board_->have_peers_finished(rank_); }

 private:
  void make_and_map(Group& host, Device& device, const Call& call, size_t stage_bytes);

  const int rank_;
  const OwningProcess owner_;
  std::string why_not_;
  std::vector<std::string> identities_;
  std::shared_ptr<LetGoBoard> board_;
  std::shared_ptr<void> own_;
  size_t stage_bytes_ = 0;
  std::vector<std::shared_ptr<void>> stages_;  ///< by rank
};

}  // namespace ours
