#include "transport/node/node_heap.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <new>

#include "common/error.h"
#include "common/huge_pages.h"
#include "common/shared_memory.h"

// Linux's number, for systems whose headers are older than their kernel.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ours {

namespace {

size_t page_bytes() {
  static const auto kPage = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return kPage;
}

size_t whole_pages(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

/// Copies the pages of a private map of a file, which the system would otherwise copy one by one as they are written
/// to. Returns false if there is no memory for that.
bool copy_pages(std::byte* data, size_t bytes) {
  int result = 0;
  do {
    result = ::madvise(data, bytes, MADV_POPULATE_WRITE);
  } while (result != 0 && errno == EINTR);
  if (result == 0 || errno != EINVAL) return result == 0;
  // For systems before Linux 5.14. No write of another thread may be lost meanwhile.
  for (size_t at = 0; at < bytes; at += page_bytes()) reinterpret_cast<std::atomic<uint8_t>*>(data + at)->fetch_or(0);
  return true;
}

off_t file_offset(int rank, uint64_t offset) {
  return static_cast<off_t>(static_cast<uint64_t>(rank) * NodeHeap::kArenaBytes + offset);
}

/// Reserves addresses for an arena, which begin with a huge page, as its part of the file does. MAP_FAILED if there
/// are none.
void* room_for_arena() {
  const size_t bytes = NodeHeap::kArenaBytes + kHugePage;
  void* const room = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) return room;
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(room) % kHugePage) % kHugePage;
  auto* const arena = static_cast<std::byte*>(room) + before;
  if (before > 0) ::munmap(room, before);
  ::munmap(arena + NodeHeap::kArenaBytes, kHugePage - before);
  return arena;
}

}  // namespace

Fd NodeHeap::create_file(int ranks) {
  return make_memory_file("ours_heap", static_cast<size_t>(file_offset(ranks, 0)));
}

NodeHeap::NodeHeap(int rank, int ranks, Fd file, bool huge_pages)
    : rank_(rank),
      file_(std::move(file)),
      huge_pages_(huge_pages && huge_pages_allowed()),
      arenas_(static_cast<size_t>(ranks)) {
  ForkGuard::add(*this);
}

NodeHeap::~NodeHeap() {
  ForkGuard::remove(*this);
  for (std::byte* arena : arenas_) {
    if (arena != nullptr) ::munmap(arena, kArenaBytes);
  }
}

std::byte* NodeHeap::allocate(size_t bytes) {
  const size_t pages = whole_pages(bytes == 0 ? 1 : bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  // An error here does no harm; a peer's arena that cannot be mapped in the middle of a reduction would.
  for (size_t r = 0; r < arenas_.size(); ++r) arena(static_cast<int>(r));
  std::byte* const base = arena(rank_);
  const uint64_t offset = take(pages);
  // Done now, so that a later access cannot die of SIGBUS.
  try {
    reserve_memory(file_.get(), static_cast<size_t>(file_offset(rank_, offset)), pages);
  } catch (...) {
    give(offset, pages);
    throw;
  }
  used_[offset] = pages;
  if (huge_pages_) move_full_pages(offset, pages);
  return base + offset;
}

void NodeHeap::free(std::byte* data) noexcept {
  if (!owner_.is_here()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = used_.find(static_cast<uint64_t>(data - arenas_[static_cast<size_t>(rank_)]));
  if (found == used_.end()) return;
  const auto [offset, bytes] = *found;
  used_.erase(found);
  if (!own_.empty()) ::madvise(data, bytes, MADV_DONTNEED);
  give_back_pages(offset, bytes);
  if (own_.empty()) give(offset, bytes);
}

void NodeHeap::give_back_pages(uint64_t offset, size_t bytes) {
  ::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, file_offset(rank_, offset),
              static_cast<off_t>(bytes));
}

void NodeHeap::withdraw(uint64_t offset, size_t bytes) noexcept {
  const std::lock_guard<std::mutex> no_forks(ForkGuard::no_forks());
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t end = whole_pages(offset + bytes);
  for (uint64_t at = offset / page_bytes() * page_bytes(); at < end;) {
    const auto next = own_.upper_bound(at);
    if (next != own_.begin() && std::prev(next)->second > at) {
      at = std::prev(next)->second;
      continue;
    }
    const uint64_t stop = next == own_.end() ? end : std::min(end, next->first);
    try {
      own_[at] = stop;
    } catch (const std::bad_alloc&) {
      return;
    }
    if (!map_own(rank_, at, stop)) {
      own_.erase(at);
      return;
    }
    // In parts; peers lose each part before the next one is copied, so it takes hardly any memory.
    for (; at < stop; at += std::min<uint64_t>(stop - at, kHugePage)) {
      const size_t part = std::min<uint64_t>(stop - at, kHugePage);
      if (copy_pages(arenas_[static_cast<size_t>(rank_)] + at, part)) give_back_pages(at, part);
    }
  }
}

uint64_t NodeHeap::offset_of(const void* data, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::byte* const base = arenas_[static_cast<size_t>(rank_)];
  const auto* const begin = static_cast<const std::byte*>(data);
  if (base == nullptr || begin < base || begin >= base + end_) return kNowhere;
  const auto offset = static_cast<uint64_t>(begin - base);
  auto piece = used_.upper_bound(offset);
  if (piece == used_.begin()) return kNowhere;
  --piece;
  return offset + bytes <= piece->first + piece->second ? offset : kNowhere;
}

std::byte* NodeHeap::at(int rank, uint64_t offset) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arena(rank) + offset;
}

size_t NodeHeap::bytes_in_use() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  size_t sum = 0;
  for (const auto& piece : used_) sum += piece.second;
  return sum;
}

std::byte* NodeHeap::arena(int rank) {
  std::byte*& arena = arenas_.at(static_cast<size_t>(rank));
  if (arena == nullptr) {
    void* const room = room_for_arena();
    void* const address = room == MAP_FAILED
                              ? MAP_FAILED
                              : ::mmap(room, kArenaBytes, PROT_READ | PROT_WRITE,
                                       MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file_.get(), file_offset(rank, 0));
    if (address == MAP_FAILED) {
      const int error = errno;
      if (room != MAP_FAILED) ::munmap(room, kArenaBytes);
      throw SystemError("cannot map a rank's shared memory (is `ulimit -v` set?)", error);
    }
    // A core dump would read every page, and reading it allocates its memory.
    ::madvise(address, kArenaBytes, MADV_DONTDUMP);
    arena = static_cast<std::byte*>(address);
  }
  return arena;
}

void NodeHeap::move_full_pages(uint64_t offset, size_t bytes) {
  // The first and the last huge page that the piece touches may have gaps, or reach beyond the end.
  uint64_t begin = offset / kHugePage * kHugePage;
  uint64_t end = (offset + bytes + kHugePage - 1) / kHugePage * kHugePage;
  const auto next = gaps_.lower_bound(offset);
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second > begin) begin += kHugePage;
  }
  if (end > end_ || (next != gaps_.end() && next->first < end)) end -= kHugePage;
  for (; begin < end; begin += kHugePage) {
    if (moved_.insert(begin).second) move_to_huge_pages(arenas_[static_cast<size_t>(rank_)] + begin, kHugePage);
  }
}

void NodeHeap::keep_to_oneself() noexcept {
  // Runs in the child of a fork, so only system calls are allowed. Another thread may just have been mapping another
  // arena. That arena is not seen here, but no thread has memory of it yet.
  for (size_t r = 0; r < arenas_.size(); ++r) {
    if (arenas_[r] == nullptr) continue;
    const auto rank = static_cast<int>(r);
    uint64_t begin = 0;
    for (auto own = own_.begin(); rank == rank_ && own != own_.end(); ++own) {
      if (own->first > begin) map_own(rank, begin, own->first);
      begin = own->second;
    }
    // The child goes on sharing what cannot be mapped.
    map_own(rank, begin, kArenaBytes);
  }
}

bool NodeHeap::map_own(int rank, uint64_t begin, uint64_t end) noexcept {
  std::byte* const place = arenas_[static_cast<size_t>(rank)] + begin;
  return map_privately(place, end - begin, file_.get(), file_offset(rank, begin));
}

uint64_t NodeHeap::take(size_t bytes) {
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    if (gap->second < bytes) continue;
    const auto [offset, size] = *gap;
    gaps_.erase(gap);
    if (size > bytes) gaps_[offset + bytes] = size - bytes;
    return offset;
  }
  if (bytes > kArenaBytes - end_) throw SystemError("a rank's shared memory is full", ENOMEM);
  const uint64_t offset = end_;
  end_ += bytes;
  return offset;
}

void NodeHeap::give(uint64_t offset, size_t bytes) {
  auto next = gaps_.lower_bound(offset);
  if (next != gaps_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = gaps_.erase(next);
  }
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
      gaps_.erase(before);
    }
  }
  if (offset + bytes == end_) {
    end_ = offset;
  } else {
    gaps_[offset] = bytes;
  }
}

}  // namespace ours
