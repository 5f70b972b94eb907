#include "collectives/device/free_ranges.h"

#include <iterator>

namespace ours {

std::optional<uint64_t> FreeRanges::take(uint64_t bytes) {
  for (auto gap = gaps_.begin(); gap != gaps_.end(); ++gap) {
    const auto [offset, size] = *gap;
    if (size < bytes) continue;
    gaps_.erase(gap);
    if (size > bytes) gaps_[offset + bytes] = size - bytes;
    taken_[offset] = bytes;
    return offset;
  }
  return std::nullopt;
}

void FreeRanges::give(uint64_t offset) {
  const auto found = taken_.find(offset);
  if (found == taken_.end()) return;
  uint64_t bytes = found->second;
  taken_.erase(found);
  const auto next = gaps_.lower_bound(offset);
  if (next != gaps_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      offset = before->first;
      bytes += before->second;
    }
  }
  if (next != gaps_.end() && next->first == offset + bytes) {
    bytes += next->second;
    gaps_.erase(next);
  }
  gaps_[offset] = bytes;
}

bool FreeRanges::holds(uint64_t offset, uint64_t bytes) const {
  auto piece = taken_.upper_bound(offset);
  if (piece == taken_.begin()) return false;
  --piece;
  return offset + bytes <= piece->first + piece->second;
}

}  // namespace ours
