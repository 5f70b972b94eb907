#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/shared_memory.h"

// When memory that peers have mapped may be given back to the device: not before all of them have let go of it, or what
// they do is undefined. A group's end does not wait for its peers, so who shared memory leaves it behind, and it is
// given back when this is next looked at after the last peer has let go.

namespace ours {

/// Where the ranks of a node write, in memory that they share, how many calls they have finished, and that they have
/// let go of their peers' memory. Who cannot reach it never has; a rank that has died never does. Their peers keep
/// their memory until they end.
class LetGoBoard {
 public:
  /// On one rank.
  static std::shared_ptr<LetGoBoard> create(int ranks);
  /// On the others, of the creator's path(); null where it cannot be opened.
  static std::shared_ptr<LetGoBoard> open(const std::string& path, int ranks);

  explicit LetGoBoard(std::shared_ptr<SharedMemory> memory, int ranks) : memory_(std::move(memory)), ranks_(ranks) {}

  /// For open() in other processes of this node and user.
  std::string path() const;

  /// Rank `rank` has finished one more call, and does not use peers' memory for it any more.
  void finish_call(int rank) noexcept { calls(rank).fetch_add(1, std::memory_order_release); }
  /// Whether all ranks have finished as many as `rank`, or have let go.
  bool have_all_finished_calls_of(int rank) const noexcept;

  /// Rank `rank` has no memory of a peer's mapped, and never will again.
  void let_go(int rank) noexcept { flag(rank).store(1, std::memory_order_release); }
  /// Whether all but `owner` have.
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

/// Gives back `memory`, which `owner` had shared with the ranks of the board, as soon as these have let go of it: now,
/// or in a later call of this or of give_back_what_is_free(). Without a board, when the process ends.
void retire(std::vector<std::shared_ptr<void>> memory, std::shared_ptr<LetGoBoard> board, int owner) noexcept;

/// Not where work of the device's may wait for the caller: to free memory waits for all of it.
void give_back_what_is_free() noexcept;

/// How many groups' memory is still to be given back, for tests.
size_t retired_and_kept();

}  // namespace ours
