#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "common/deadline.h"
#include "transport/node/node_session.h"

namespace ours {

/// The core that rank `rank` should move to, or -1 to stay, given each rank's current core: the core in `allowed` with
/// the fewest ranks, if it has at least two fewer than the rank's own. Only the highest rank on a core moves, so that
/// all ranks can decide without communicating.
int better_core(const std::vector<int>& cores, int rank, const std::vector<int>& allowed);

/// Moves the calling thread to `core`, then restores its affinity mask. Returns false if the system refuses.
bool move_to_core(int core);

/// Spreads the ranks of a node over its cores while they communicate. The scheduler may leave three of four ranks on
/// one of two cores, because to it a rank that yields looks as busy as one that works. If other programs make the
/// scheduler undo the move, it is tried less and less often.
class CoreSpread {
 public:
  /// Where a rank says on which core it runs.
  using Place = std::atomic<int32_t>& (*)(RankBlock& rank, size_t parity);

  CoreSpread(NodeSession& session, Place place);

  /// Says where this rank runs. Among collectives, called before a synchronisation of all ranks, of that parity.
  void publish(size_t parity = 0);
  /// Says that it does not matter any more.
  void withdraw() { place_(session_.self(), 0).store(-1, std::memory_order_relaxed); }

  /// Moves this rank if it is the one that should move, and returns whether it did. Among collectives, called after
  /// that synchronisation.
  bool settle(size_t parity = 0);

 private:
  int core_of(int rank, size_t parity) const {
    return place_(session_.block(rank), parity).load(std::memory_order_relaxed);
  }

  NodeSession& session_;
  const Place place_;
  int fair_;                    ///< the most ranks on one core when they are spread evenly
  Clock::time_point next_{};    ///< no look before that
  Clock::time_point proven_{};  ///< a move that has lasted until then was not undone
  Clock::duration pause_{};
  bool moved_ = false;  ///< whether the last search for a better core led to a move
};

}  // namespace ours
