#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "common/shared_memory.h"

namespace ours {

/// Tells when memory that peers have mapped may be given back to the device. That is not before all of them have let
/// go of it; anything else is undefined behaviour. The end of a group does not wait for its peers, so the memory is
/// released later (deferred_release.h), when this board of flags, which the ranks of a node share, says so.
///
/// Each rank writes how many calls it has finished, and that it has let go of its peers' memory. A rank that has died
/// never does, and its peers keep their memory until they end.
class LetGoBoard {
 public:
  /// Makes the board; called on one rank.
  static std::shared_ptr<LetGoBoard> create(int ranks);
  /// Opens the board at the creator's path(), on the other ranks. Throws SystemError.
  static std::shared_ptr<LetGoBoard> open(const std::string& path, int ranks);

  explicit LetGoBoard(std::shared_ptr<SharedMemory> memory, int ranks) : memory_(std::move(memory)), ranks_(ranks) {}

  /// What other processes of this node and user pass to open().
  std::string path() const;

  /// Rank `rank` has finished one more call, and does not use peers' memory for it any more.
  void finish_call(int rank) noexcept { calls(rank).fetch_add(1, std::memory_order_release); }
  /// Whether all other ranks have finished as many calls as `rank`, or have let go.
  bool have_all_finished_calls_of(int rank) const noexcept;

  /// Says that rank `rank` has no memory of a peer mapped, and never will again.
  void let_go(int rank) noexcept { flag(rank).store(1, std::memory_order_release); }
  /// Whether all ranks but `owner` have let go.
  bool is_free(int owner) const noexcept;

 private:
  struct Entry {
    std::atomic<uint32_t> has_let_go;
    std::atomic<uint32_t> calls;
  };
  static_assert(std::atomic<uint32_t>::is_always_lock_free);

  static size_t bytes_for(int ranks) { return static_cast<size_t>(ranks) * sizeof(Entry); }
  Entry& entry(int rank) const { return reinterpret_cast<Entry*>(memory_->data())[rank]; }
  std::atomic<uint32_t>& flag(int rank) const { return entry(rank).has_let_go; }
  std::atomic<uint32_t>& calls(int rank) const { return entry(rank).calls; }

  const std::shared_ptr<SharedMemory> memory_;
  const int ranks_;
};

}  // namespace ours
