#include "collectives/device/device_heap.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "device/deferred_release.h"

namespace ours {

namespace {

constexpr size_t kSegmentAlign = size_t{2} << 20;
constexpr std::chrono::seconds kClearing{60};

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

}  // namespace

DeviceHeap::DeviceHeap(std::shared_ptr<Device> device, std::shared_ptr<LetGoBoard> board, int rank)
    : device_(std::move(device)), board_(std::move(board)), rank_(rank), stream_(device_->make_stream()) {}

DeviceHeap::~DeviceHeap() {
  auto memory = std::make_shared<std::vector<Segment>>(std::move(segments_));
  if (memory->empty()) return;
  // Without a board, nobody knows when the peers have let go.
  release_when([board = board_, rank = rank_] { return board && board->is_free(rank); }, std::move(memory));
}

uint64_t DeviceHeap::add_segment(size_t bytes) {
  // Without the lock, which reductions need, because allocating memory may take long.
  std::shared_ptr<void> memory = device_->memory(bytes);
  const MemoryHandle handle = device_->share(memory.get());
  const std::lock_guard<std::mutex> lock(mutex_);
  segments_.push_back({std::move(memory), bytes, handle, true});
  return segments_.size() - 1;
}

std::optional<uint64_t> DeviceHeap::take(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Segment* best = nullptr;
  for (Segment& segment : segments_) {
    // A small tensor must not keep the segment of a large one.
    if (segment.in_use || segment.bytes < bytes || segment.bytes / 2 > bytes) continue;
    if (best == nullptr || segment.bytes < best->bytes) best = &segment;
  }
  if (best == nullptr) return std::nullopt;
  best->in_use = true;
  return best - segments_.data();
}

std::shared_ptr<void> DeviceHeap::allocate(size_t bytes) {
  const size_t rounded = round_up(std::max<size_t>(bytes, 1), kSegmentAlign);
  const std::optional<uint64_t> taken = take(rounded);
  const uint64_t number = taken ? *taken : add_segment(rounded);
  std::shared_ptr<void> whole(at({number, 0}), [heap = shared_from_this(), number](void*) {
    const std::lock_guard<std::mutex> lock(heap->mutex_);
    heap->segments_[number].in_use = false;
  });
  device_->clear(whole.get(), rounded, stream_->handle());
  const auto cleared = device_->make_event();
  cleared->record(stream_->handle());
  wait_reached(*cleared, Deadline::after(kClearing), nullptr, "the clearing of memory of the device");
  return whole;
}

std::optional<DevicePlace> DeviceHeap::place_of(const void* data, size_t bytes) const {
  const auto* const begin = static_cast<const std::byte*>(data);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (uint64_t s = 0; s < segments_.size(); ++s) {
    const Segment& segment = segments_[s];
    if (begin < segment.begin() || begin >= segment.begin() + segment.bytes) continue;
    const auto offset = static_cast<uint64_t>(begin - segment.begin());
    if (segment.in_use && offset + bytes <= segment.bytes) return DevicePlace{s, offset};
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
