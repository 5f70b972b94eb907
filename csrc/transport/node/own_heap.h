#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "common/fork_guard.h"
#include "common/owning_process.h"
#include "transport/node/heap_file.h"

namespace ours {

/// Memory that this process gives to tensors, and that the other processes of the node can read and write where it
/// lies, so that a reduction needs no copies. Pages cost nothing until they are given out, and are returned when they
/// are freed. Safe to use from any thread.
class OwnHeap final : private SharedWithOthers {
 public:
  static constexpr uint64_t kNowhere = ~uint64_t{0};

  /// Throws SystemError if there is no memory file or no address space for it.
  explicit OwnHeap(bool huge_pages = false);
  OwnHeap(const OwnHeap&) = delete;
  OwnHeap& operator=(const OwnHeap&) = delete;
  ~OwnHeap();

  /// Returns `bytes` of zeroed memory, aligned to a page. Throws SystemError if there is no memory or no address
  /// space for it.
  std::byte* allocate(size_t bytes);

  /// Returns what allocate() gave. Does nothing in a forked child: the memory is the parent's, and what the child
  /// writes there stays its own.
  void free(std::byte* data) noexcept;

  /// Where [data, data + bytes) lies in the heap; kNowhere unless all of it was given out as one piece of which nothing
  /// was withdrawn.
  uint64_t offset_of(const void* data, size_t bytes) const;

  /// The same for an operation of `user` in which peers use the memory. A piece has one user at a time; where it has
  /// another one, this returns kNowhere.
  uint64_t claim(const void* data, size_t bytes, const void* user);
  /// Ends that of all that `user` has claimed of the piece, which may have the next user already.
  void release(uint64_t offset, const void* user) noexcept;

  /// For a group that has failed: makes the pages of [offset, offset + bytes) private, so that later writes of peers no
  /// longer reach them. Addresses and contents stay, and other threads may write there meanwhile. Pages that the system
  /// cannot make private stay shared. The piece to which they belong must last as long as the call, and its addresses
  /// are not given out again.
  void withdraw(uint64_t offset, size_t bytes) noexcept;

  /// The bytes of addresses that have been lost in this way.
  size_t lost() const;

  /// The address here of an offset.
  std::byte* at(uint64_t offset) const { return file_.data() + offset; }

  HeapPlace place() const { return file_.place(); }

 private:
  struct Piece {
    size_t bytes;                ///< in whole pages
    const void* user = nullptr;  ///< whose operation uses it now
    bool withdrawn = false;      ///< some of it, so a late peer may still write to it
  };
  using Pieces = std::map<uint64_t, Piece>;  // by offset

  void keep_to_oneself() noexcept override;
  /// Moves huge pages that are full now that [offset, offset + bytes) has been taken, each only once: moving pays only
  /// for memory that stays.
  void move_full_pages(uint64_t offset, size_t bytes);
  uint64_t take(size_t bytes);
  void give(uint64_t offset, size_t bytes);
  Pieces::iterator piece_at(uint64_t offset);
  /// What offset_of() returns.
  uint64_t find(const void* data, size_t bytes) const;

  const HeapFile file_;
  const bool huge_pages_;
  const OwningProcess owner_;
  mutable std::mutex mutex_;         // guards all below
  Pieces used_;                      // what was given out
  std::map<uint64_t, size_t> gaps_;  // freed pieces below end_, never adjacent
  std::set<uint64_t> moved_;         // offsets of huge pages
  size_t lost_ = 0;                  // bytes of pieces that were withdrawn
  uint64_t end_ = 0;
  // Withdrawn ranges, begin -> end, which do not touch. Guarded by no_forks() of ForkGuard alone.
  std::map<uint64_t, uint64_t> own_;
};

}  // namespace ours
