#pragma once

#include <array>
#include <cstddef>

namespace ours {

/// The gates through which the ranks of a node synchronise: two ranks share one, two of these gates share one of the
/// next level, and so on to the last gate. Who comes to a gate second goes on to the next one for both, so that no rank
/// reads what every other rank writes. The idea is the software combining tree of Mellor-Crummey and Scott, "Algorithms
/// for Scalable Synchronization on Shared-Memory Multiprocessors", ACM TOCS 9 (1991).
///
/// Those who come to a gate are the members of its level, and members 2i and 2i + 1 share gate i of it. The members of
/// level 0 are the ranks, and those of any other level the gates of the level below.
class GateTree {
 public:
  explicit GateTree(size_t ranks) {
    size_t members = ranks;
    do {
      members_[levels_++] = members;
      members = (members + 1) / 2;
      first_gate_[levels_] = first_gate_[levels_ - 1] + members;
    } while (members > 1);
  }

  size_t levels() const { return levels_; }
  size_t members(size_t level) const { return members_[level]; }
  /// How many gates there are on all levels.
  size_t gates() const { return first_gate_[levels_]; }
  /// The number, of all gates, of the one to which a member of that level comes.
  size_t gate_of(size_t level, size_t member) const { return first_gate_[level] + member / 2; }
  /// The number, of all gates, of the one that is that member of a level above 0.
  size_t gate_that_is(size_t level, size_t member) const { return first_gate_[level - 1] + member; }
  size_t last_gate() const { return gates() - 1; }
  /// Whether nobody else comes to a member's gate.
  bool is_alone(size_t level, size_t member) const { return (member ^ 1) >= members_[level]; }

 private:
  static constexpr size_t kMostLevels = 32;

  size_t levels_ = 0;
  std::array<size_t, kMostLevels> members_{};
  std::array<size_t, kMostLevels + 1> first_gate_{};
};

}  // namespace ours
