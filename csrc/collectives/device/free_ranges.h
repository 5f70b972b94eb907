#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace ours {

/// Keeps the taken and the free ranges of [0, bytes).
class FreeRanges {
 public:
  explicit FreeRanges(uint64_t bytes) {
    if (bytes != 0) gaps_[0] = bytes;
  }

  /// Takes the lowest free range of that length and returns its offset. Needs bytes > 0.
  std::optional<uint64_t> take(uint64_t bytes);
  /// Frees what take() returned.
  void give(uint64_t offset);

  /// Whether [offset, offset + bytes) lies within one taken range.
  bool holds(uint64_t offset, uint64_t bytes) const;

 private:
  std::map<uint64_t, uint64_t> taken_;  ///< offset -> bytes
  std::map<uint64_t, uint64_t> gaps_;   ///< the same, never adjacent
};

}  // namespace ours
