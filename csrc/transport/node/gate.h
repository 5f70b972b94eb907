#pragma once

#include <cstdint>

#include "transport/node/node_layout.h"

namespace ours {

/// Adds what one rank shows to what several show together. Their order does not matter.
using Gather = void (*)(Shown& all, const Shown& one);

/// Gate::came, taken apart.
struct Came {
  static constexpr uint8_t kBoth = 3;

  uint32_t number;  ///< of the synchronisation
  uint8_t sides;    ///< who has come: a bit for each of two
  bool writing;     ///< whether the first to come has not yet written what it shows
  uint16_t rank;    ///< the first while it alone has come, and the one that goes on when both have

  static Came of(uint64_t word) {
    return {static_cast<uint32_t>(word >> 32), static_cast<uint8_t>(word >> 24 & kBoth), (word >> 16 & 1) != 0,
            static_cast<uint16_t>(word)};
  }
  uint64_t word() const {
    return uint64_t{number} << 32 | uint64_t{sides} << 24 | uint64_t{writing} << 16 | uint64_t{rank};
  }
};

/// A rank's way through a gate, in one synchronisation. Whoever comes first writes what it shows and is done, and
/// whoever comes second reads that and goes on. If the second comes while the first is writing, it writes too and is
/// done, and the first goes on. So nobody waits for the other.
class GatePass {
 public:
  /// `side`: the bit of this rank and all behind it, or Came::kBoth if nobody else comes to the gate.
  GatePass(Gate& gate, uint32_t number, uint16_t rank, uint8_t side)
      : gate_(gate),
        first_{number, side, true, rank},
        written_{number, side, false, rank},
        both_{number, Came::kBoth, false, rank} {}

  /// Comes to the gate with what `all` says of this rank and those behind it. Returns whether it has to go on; then
  /// `all` has become what both sides show. If `all` is null, which it is for all ranks or for none, they show nothing.
  bool come(Shown* all, Gather gather);

  /// The second part of that for who came first, when it has written what it shows.
  bool finish(Shown& all, Gather gather);

 private:
  bool change(uint64_t& from, const Came& to);

  Gate& gate_;
  const Came first_;
  const Came written_;
  const Came both_;
};

}  // namespace ours
