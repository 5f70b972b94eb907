#include "collectives/device/device_heap.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "device/deferred_release.h"

namespace ours {

namespace {

constexpr size_t kPage = 4096;
/// The smallest segment for pieces; peers map each segment, so there should be few.
constexpr size_t kLeastSegment = size_t{32} << 20;
constexpr size_t kSegmentAlign = size_t{2} << 20;
/// The bytes that are copied from the host to make zeros; the rest is copied from these.
constexpr size_t kZeros = 64 * 1024;
constexpr std::chrono::seconds kZeroTimeout{60};

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

DeviceHeap::DeviceHeap(std::shared_ptr<Device> device, std::shared_ptr<LetGoBoard> board, int rank)
    : device_(std::move(device)),
      board_(std::move(board)),
      rank_(rank),
      stream_(device_->make_stream()),
      zeroed_(device_->make_event()),
      zeros_(device_->pinned_memory(kZeros)) {}

DeviceHeap::~DeviceHeap() {
  auto memory = std::make_shared<std::vector<Segment>>(std::move(segments_));
  if (memory->empty()) return;
  // Without a board, nobody knows when the peers have let go.
  release_when([board = board_, rank = rank_] { return board && board->is_free(rank); }, std::move(memory));
}

uint64_t DeviceHeap::add_segment(size_t bytes) {
  Segment made = make_segment(bytes, false);
  const std::lock_guard<std::mutex> lock(mutex_);
  segments_.push_back(std::move(made));
  return segments_.size() - 1;
}

// Runs without the lock, which reductions need, because allocating memory may take long.
DeviceHeap::Segment DeviceHeap::make_segment(size_t bytes, bool for_pieces) {
  std::shared_ptr<void> memory = device_->memory(bytes);
  const MemoryHandle handle = device_->share(memory.get());
  return {std::move(memory), bytes, handle, FreeRanges(for_pieces ? bytes : 0)};
}

DevicePlace DeviceHeap::take(size_t bytes) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (uint64_t s = 0; s < segments_.size(); ++s) {
      if (const auto offset = segments_[s].ranges.take(bytes)) return {s, *offset};
    }
  }
  Segment made = make_segment(std::max(round_up(bytes, kSegmentAlign), kLeastSegment), true);
  // There is room, from its beginning.
  const uint64_t offset = made.ranges.take(bytes).value_or(0);
  const std::lock_guard<std::mutex> lock(mutex_);
  segments_.push_back(std::move(made));
  return {segments_.size() - 1, offset};
}

std::shared_ptr<void> DeviceHeap::allocate(size_t bytes) {
  const size_t pages = round_up(std::max<size_t>(bytes, 1), kPage);
  const DevicePlace place = take(pages);
  std::shared_ptr<void> piece(at(place), [heap = shared_from_this(), place](void*) { heap->free(place); });
  zero(static_cast<std::byte*>(piece.get()), pages);
  return piece;
}

void DeviceHeap::free(DevicePlace place) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  segments_[place.segment].ranges.give(place.offset);
}

void DeviceHeap::zero(std::byte* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(zero_mutex_);
  size_t done = std::min(bytes, kZeros);
  device_->copy(data, zeros_.get(), done, stream_->handle());
  while (done < bytes) {
    const size_t more = std::min(done, bytes - done);
    device_->copy(data + done, data, more, stream_->handle());
    done += more;
  }
  zeroed_->record(stream_->handle());
  wait_reached(*zeroed_, Deadline::after(kZeroTimeout), [] {}, "the making of zeros for memory of the device");
}

std::optional<DevicePlace> DeviceHeap::place_of(const void* data, size_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (uint64_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (begin < segment.begin() || begin >= segment.begin() + segment.bytes) continue;
    const auto offset = static_cast<uint64_t>(begin - segment.begin());
    if (segment.ranges.holds(offset, bytes)) return DevicePlace{s, offset};
    return std::nullopt;
  }
  return std::nullopt;
}

size_t DeviceHeap::segments() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return segments_.size();
}

DeviceHeap::Shared DeviceHeap::shared(uint64_t segment) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return {segments_[segment].bytes, segments_[segment].handle};
}

std::byte* DeviceHeap::at(DevicePlace place) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return segments_[place.segment].begin() + place.offset;
}

}  // namespace ours
