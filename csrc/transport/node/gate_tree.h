#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace ours {

/// The gates through which the ranks of a node synchronise: up to kWidth ranks share one, up to kWidth of these gates
/// share one of the next level, and so on to the last gate. The rank that comes to a gate last goes on to the next one
/// for all of them, so that no rank reads what every other rank writes. The idea is the software combining tree of
/// Mellor-Crummey and Scott, "Algorithms for Scalable Synchronization on Shared-Memory Multiprocessors", ACM TOCS 9
/// (1991).
class GateTree {
 public:
  /// With more, the last one to come has more lines to fetch; with fewer, there are more levels.
  static constexpr size_t kWidth = 4;

  /// Those who share a gate: members first, first + 1, ... of a level. The members of level 0 are the ranks, and those
  /// of any other level the gates of the level below.
  struct Group {
    size_t gate;  ///< its number, of all gates
    size_t first;
    size_t size;
  };

  explicit GateTree(size_t ranks) {
    size_t members = ranks;
    do {
      members_[levels_++] = members;
      members = (members + kWidth - 1) / kWidth;
      first_gate_[levels_] = first_gate_[levels_ - 1] + members;
    } while (members > 1);
  }

  size_t levels() const { return levels_; }
  size_t members(size_t level) const { return members_[level]; }
  /// How many gates there are on all levels.
  size_t gates() const { return first_gate_[levels_]; }
  /// The number of a gate of that level, of all gates.
  size_t gate(size_t level, size_t index) const { return first_gate_[level] + index; }
  size_t last_gate() const { return gates() - 1; }

  /// The group of a member.
  Group group(size_t level, size_t member) const {
    const size_t first = member / kWidth * kWidth;
    return {gate(level, member / kWidth), first, std::min(kWidth, members_[level] - first)};
  }

 private:
  static constexpr size_t kMostLevels = 16;

  size_t levels_ = 0;
  std::array<size_t, kMostLevels> members_{};
  std::array<size_t, kMostLevels + 1> first_gate_{};
};

}  // namespace ours
