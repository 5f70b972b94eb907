#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace ours {

/// What is taken and what is free of [0, bytes).
class FreeRanges {
 public:
  explicit FreeRanges(uint64_t bytes) {
    if (bytes != 0) gaps_[0] = bytes;
  }

  /// The lowest place with so much room, which is taken then. Needs bytes > 0.
  std::optional<uint64_t> take(uint64_t bytes);
  /// Frees what take() gave there.
  void give(uint64_t offset);

  /// Whether [offset, offset + bytes) is part of what one take() gave.
  bool holds(uint64_t offset, uint64_t bytes) const;

 private:
  std::map<uint64_t, uint64_t> taken_;  ///< offset -> bytes
  std::map<uint64_t, uint64_t> gaps_;   ///< the same, never adjacent
};

}  // namespace ours
