#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "common/fd.h"
#include "common/fork_guard.h"
#include "common/owning_process.h"

namespace ours {

/// Memory for tensors that the peers of a node can read and write where it lies, so that a reduction needs no copies.
/// One sparse file, made by the leader, holds an arena for each rank, which gives out pieces of it. Pages cost nothing
/// until they are given out, and are returned when they are freed. Safe to use from any thread.
class NodeHeap final : private SharedWithOthers {
 public:
  static constexpr uint64_t kNowhere = ~uint64_t{0};

  /// The most that a rank can give out. This is address space, not memory.
  static constexpr size_t kArenaBytes = size_t{1} << 36;

  /// Makes a new file for `ranks` arenas.
  static Fd create_file(int ranks);

  /// Rank `rank`'s view of `file`, which the ranks share.
  NodeHeap(int rank, int ranks, Fd file, bool huge_pages = false);
  NodeHeap(const NodeHeap&) = delete;
  NodeHeap& operator=(const NodeHeap&) = delete;
  ~NodeHeap();

  /// Returns `bytes` of zeroed memory, aligned to a page. Throws SystemError if there is no memory or no address
  /// space for it.
  std::byte* allocate(size_t bytes);

  /// Returns what allocate() gave. Does nothing in a forked child: the memory is the parent's, and what the child
  /// writes there stays its own.
  void free(std::byte* data) noexcept;

  /// Where [data, data + bytes) lies in this rank's arena; kNowhere unless all of it was given out as one piece.
  uint64_t offset_of(const void* data, size_t bytes) const;

  /// For a group that has failed: makes the pages of [offset, offset + bytes) in this rank's arena private, so that
  /// later writes of peers no longer reach it. Addresses and contents stay, and other threads may write there
  /// meanwhile. The range is not given out again. Pages that the system cannot make private stay shared.
  void withdraw(uint64_t offset, size_t bytes) noexcept;

  /// The address here of an offset in `rank`'s arena. Throws SystemError if there is no address space for it.
  std::byte* at(int rank, uint64_t offset);

  /// Bytes given out by this rank, in whole pages.
  size_t bytes_in_use() const;

 private:
  std::byte* arena(int rank);
  void keep_to_oneself() noexcept override;
  /// Calls map_privately() for [begin, end) of `rank`'s arena.
  bool map_own(int rank, uint64_t begin, uint64_t end) noexcept;
  /// Moves the huge pages that are full now that [offset, offset + bytes) has been taken, each only once: moving pays
  /// only for memory that stays.
  void move_full_pages(uint64_t offset, size_t bytes);
  void give_back_pages(uint64_t offset, size_t bytes);
  uint64_t take(size_t bytes);
  void give(uint64_t offset, size_t bytes);

  const int rank_;
  const Fd file_;
  const bool huge_pages_;
  const OwningProcess owner_;
  mutable std::mutex mutex_;  // guards all below
  std::vector<std::byte*> arenas_;
  std::map<uint64_t, size_t> used_;  // offset -> bytes, in whole pages
  std::map<uint64_t, size_t> gaps_;  // freed pieces below end_, never adjacent
  std::set<uint64_t> moved_;         // offsets of huge pages
  // Withdrawn ranges, begin -> end, which do not touch. Guarded by no_forks() of ForkGuard, too.
  std::map<uint64_t, uint64_t> own_;
  uint64_t end_ = 0;
};

}  // namespace ours
