#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "common/shared_memory.h"

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

}  // namespace ours
