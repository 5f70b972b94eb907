#include "collectives/device/mapped_memory.h"

#include <cstring>
#include <utility>

#include "collectives/device/device_opening.h"

namespace ours {

namespace {

/// The number of words that a segment's handle takes in a message.
constexpr size_t kHandleWords = sizeof(MemoryHandle) / sizeof(uint64_t);
constexpr size_t kSegmentWords = 1 + kHandleWords;
static_assert(sizeof(MemoryHandle) % sizeof(uint64_t) == 0);

}  // namespace

MappedMemory::MappedMemory(std::shared_ptr<Device> device, std::shared_ptr<DeviceHeap> own, int rank, int ranks)
    : device_(std::move(device)), own_(std::move(own)), rank_(rank), segments_(static_cast<size_t>(ranks)) {}

void MappedMemory::learn(Group& host, const Call& call, const std::vector<size_t>& segments) {
  std::vector<size_t> counts;
  size_t news = 0;
  for (size_t r = 0; r < segments.size(); ++r) {
    counts.push_back((segments[r] - segments_[r].size()) * kSegmentWords);
    news += counts.back();
  }
  if (news == 0) return;
  Words mine;
  const auto me = static_cast<size_t>(rank_);
  for (size_t s = segments_[me].size(); s < segments[me]; ++s) {
    const DeviceHeap::Shared shared = own_->shared(s);
    mine.push_back(shared.bytes);
    mine.resize(mine.size() + kHandleWords);
    std::memcpy(&mine[mine.size() - kHandleWords], shared.handle.data(), sizeof(MemoryHandle));
  }
  const std::vector<Words> all = gather_words(host, call, mine, counts);
  for (size_t r = 0; r < all.size(); ++r) {
    for (size_t at = 0; at < all[r].size(); at += kSegmentWords) {
      Segment segment{{all[r][at], {}}, nullptr};
      std::memcpy(segment.shared.handle.data(), &all[r][at + 1], sizeof(MemoryHandle));
      segments_[r].push_back(std::move(segment));
    }
  }
}

std::byte* MappedMemory::at(int rank, DevicePlace place) {
  if (rank == rank_) return own_->at(place);
  Segment& segment = segments_[static_cast<size_t>(rank)].at(place.segment);
  if (!segment.mapped) segment.mapped = device_->map(segment.shared.handle);
  return static_cast<std::byte*>(segment.mapped.get()) + place.offset;
}

size_t MappedMemory::segment_bytes(int rank, uint64_t segment) const {
  if (rank == rank_) return own_->shared(segment).bytes;
  return segments_[static_cast<size_t>(rank)].at(segment).shared.bytes;
}

}  // namespace ours
