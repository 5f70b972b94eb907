#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "common/fd.h"
#include "common/owning_process.h"

namespace ours {

/// Memory for tensors that the peers of a node can read and write where it lies, so that a reduction needs no copies.
/// One sparse file, made by the leader, holds an arena for each rank; a rank gives out pieces of its own, and maps all
/// of them when it first does. Pages cost nothing until they are given out, and are returned when they are freed. What
/// is given out in whole huge pages, in one piece or in several, can be moved onto such. Safe to use from any thread.
class NodeHeap {
 public:
  static constexpr uint64_t kNowhere = ~uint64_t{0};

  /// What a rank can give out at most: address space, not memory.
  static constexpr size_t kArenaBytes = size_t{1} << 36;

  /// A new file for `ranks` arenas.
  static Fd create_file(int ranks);

  /// Rank `rank`'s view of `file`, which the ranks share.
  NodeHeap(int rank, int ranks, Fd file, bool huge_pages = false);
  NodeHeap(const NodeHeap&) = delete;
  NodeHeap& operator=(const NodeHeap&) = delete;
  ~NodeHeap();

  /// `bytes` of zeros, aligned to a page. Throws SystemError where there is no memory or no address space for them.
  std::byte* allocate(size_t bytes);

  /// Returns what allocate() gave. In a forked child it does nothing: the memory is the parent's, and what the child
  /// writes there stays its own.
  void free(std::byte* data) noexcept;

  /// Where [data, data + bytes) lies in this rank's arena, or kNowhere if not all of it was given out as one piece.
  uint64_t offset_of(const void* data, size_t bytes) const;

  /// Makes the pages of [offset, offset + bytes) in this rank's arena its own: what peers still write there no longer
  /// arrives. Addresses and contents stay, and other threads may write there meanwhile. For a group that has failed:
  /// what was withdrawn is not given out again, and peers may read zeros there. Pages that the system cannot make its
  /// own stay shared.
  void withdraw(uint64_t offset, size_t bytes) noexcept;

  /// The address here of an offset in `rank`'s arena. Throws SystemError where there is no address space for it.
  std::byte* at(int rank, uint64_t offset);

  /// Bytes given out by this rank, in whole pages.
  size_t bytes_in_use() const;

 private:
  friend struct ForkGuard;

  std::byte* arena(int rank);
  void keep_to_oneself() noexcept;
  /// Maps [begin, end) of `rank`'s arena anew: what this process writes there from now on is its own. Other threads may
  /// use the memory meanwhile. False where the system refuses it.
  bool map_own(int rank, uint64_t begin, uint64_t end) noexcept;
  /// Moves the huge pages that [offset, offset + bytes), just taken, was the last to fill. Each but once: it takes so
  /// long that only memory which stays is worth it, and what was freed does not.
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
  // Withdrawn: begin -> end, apart from each other. Changes under the mutex of ForkGuard, too.
  std::map<uint64_t, uint64_t> own_;
  uint64_t end_ = 0;
};

}  // namespace ours
