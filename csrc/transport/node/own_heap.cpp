#include "transport/node/own_heap.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <new>
#include <vector>

#include "common/error.h"
#include "common/huge_pages.h"
#include "common/pages.h"

namespace ours {

namespace {

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

}  // namespace

OwnHeap::OwnHeap(bool huge_pages) : file_(HeapFile::make()), huge_pages_(huge_pages && huge_pages_allowed()) {
  ForkGuard::add(*this);
}

OwnHeap::~OwnHeap() { ForkGuard::remove(*this); }

std::byte* OwnHeap::allocate(size_t bytes) {
  const size_t pages = whole_pages(bytes == 0 ? 1 : bytes);
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t offset = take(pages);
  lock.unlock();  // for as long as it takes to reserve; the range belongs to nobody else
  try {
    // Done now, so that a later access cannot die of SIGBUS.
    file_.reserve(offset, pages);
  } catch (...) {
    lock.lock();
    give(offset, pages);
    throw;
  }
  if (huge_pages_) move_full_pages(offset, pages);
  lock.lock();
  used_[offset] = Piece{pages};
  return at(offset);
}

void OwnHeap::free(std::byte* data) noexcept {
  if (!owner_.is_here()) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = used_.find(static_cast<uint64_t>(data - file_.data()));
  if (found == used_.end()) return;
  const auto [offset, piece] = *found;
  used_.erase(found);
  if (piece.withdrawn) ::madvise(data, piece.bytes, MADV_DONTNEED);
  file_.give_back(offset, piece.bytes);
  if (!piece.withdrawn) give(offset, piece.bytes);
}

void OwnHeap::withdraw(uint64_t offset, size_t bytes) noexcept {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto piece = piece_at(offset);
    if (piece == used_.end()) return;
    if (!piece->second.withdrawn) lost_ += piece->second.bytes;
    piece->second.withdrawn = true;
  }
  const std::lock_guard<std::mutex> no_forks(ForkGuard::no_forks());
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
    if (!file_.map_own(at, stop)) {
      own_.erase(at);
      return;
    }
    // In parts; peers lose each part before the next one is copied, so it takes hardly any memory.
    for (; at < stop; at += std::min<uint64_t>(stop - at, kHugePage)) {
      const size_t part = std::min<uint64_t>(stop - at, kHugePage);
      if (copy_pages(file_.data() + at, part)) file_.give_back(at, part);
    }
  }
}

uint64_t OwnHeap::offset_of(const void* data, size_t bytes) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return find(data, bytes);
}

uint64_t OwnHeap::claim(const void* data, size_t bytes, const void* user) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t offset = find(data, bytes);
  if (offset == kNowhere) return kNowhere;
  Piece& piece = piece_at(offset)->second;
  if (piece.user != nullptr && piece.user != user) return kNowhere;
  piece.user = user;
  return offset;
}

void OwnHeap::release(uint64_t offset, const void* user) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto piece = piece_at(offset);
  if (piece != used_.end() && piece->second.user == user) piece->second.user = nullptr;
}

size_t OwnHeap::lost() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return lost_;
}

OwnHeap::Pieces::iterator OwnHeap::piece_at(uint64_t offset) {
  const auto next = used_.upper_bound(offset);
  if (next == used_.begin()) return used_.end();
  const auto piece = std::prev(next);
  return offset < piece->first + piece->second.bytes ? piece : used_.end();
}

uint64_t OwnHeap::find(const void* data, size_t bytes) const {
  const std::byte* const base = file_.data();
  const auto* const begin = static_cast<const std::byte*>(data);
  if (begin < base || begin >= base + end_) return kNowhere;
  const auto offset = static_cast<uint64_t>(begin - base);
  const auto next = used_.upper_bound(offset);
  if (next == used_.begin()) return kNowhere;
  const auto& [start, piece] = *std::prev(next);
  return offset + bytes <= start + piece.bytes && !piece.withdrawn ? offset : kNowhere;
}

void OwnHeap::move_full_pages(uint64_t offset, size_t bytes) {
  // The first and the last huge page that the piece touches may have gaps, or reach beyond the end.
  uint64_t begin = offset / kHugePage * kHugePage;
  uint64_t end = (offset + bytes + kHugePage - 1) / kHugePage * kHugePage;
  std::vector<uint64_t> full;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto next = gaps_.lower_bound(offset);
    if (next != gaps_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second > begin) begin += kHugePage;
    }
    if (end > end_ || (next != gaps_.end() && next->first < end)) end -= kHugePage;
    for (; begin < end; begin += kHugePage) {
      if (moved_.insert(begin).second) full.push_back(begin);
    }
  }
  for (const uint64_t page : full) move_to_huge_pages(at(page), kHugePage);
}

void OwnHeap::keep_to_oneself() noexcept {
  // Runs in the child of a fork, so only system calls are allowed. The child goes on sharing what cannot be mapped.
  uint64_t begin = 0;
  for (const auto& [from, to] : own_) {
    if (from > begin) file_.map_own(begin, from);
    begin = to;
  }
  file_.map_own(begin, HeapFile::kBytes);
}

uint64_t OwnHeap::take(size_t bytes) {
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    if (gap->second < bytes) continue;
    const auto [offset, size] = *gap;
    gaps_.erase(gap);
    if (size > bytes) gaps_[offset + bytes] = size - bytes;
    return offset;
  }
  if (bytes > HeapFile::kBytes - end_) throw SystemError("a rank's shared memory is full", ENOMEM);
  const uint64_t offset = end_;
  end_ += bytes;
  return offset;
}

void OwnHeap::give(uint64_t offset, size_t bytes) {
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
