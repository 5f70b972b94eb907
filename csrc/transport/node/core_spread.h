#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "common/deadline.h"
#include "transport/node/node_session.h"

namespace ours {

/// The core that rank `rank` should move to, or -1 to stay, given each rank's current core: the core in `allowed` with
/// the fewest ranks, if it has at least two fewer than the rank's own. One on the same socket, near the rank's memory,
/// comes before all others. Only the highest rank on a core moves, so that all ranks can decide without communicating.
int better_core(const std::vector<int>& cores, int rank, const std::vector<int>& allowed,
                const std::function<int(int core)>& socket_of);

/// Moves the calling thread to `core`, then restores its affinity mask. Returns false if the system refuses.
bool move_to_core(int core);

/// Spreads the ranks of a node over its cores while they communicate. The scheduler may leave three of four ranks on
/// one of two cores, because to it a rank that yields looks as busy as one that works. If other programs make the
/// scheduler undo the move, it is tried less and less often.
class CoreSpread {
 public:
  /// The place in which ranks that wait for messages say where they run; for a collective, it is the parity of its
  /// synchronisation.
  static constexpr size_t kMessages = 2;

  explicit CoreSpread(NodeSession& session);

  /// Says where this rank runs. For a collective, called before a synchronisation of all ranks.
  void publish(size_t place);
  /// Says that this rank no longer waits.
  void withdraw(size_t place) { core(session_.rank(), place).store(-1, std::memory_order_relaxed); }

  /// Moves this rank if it is the one that should move, and returns whether it did. For a collective, called after
  /// that synchronisation.
  bool settle(size_t place);

 private:
  std::atomic<int32_t>& core(int rank, size_t place) const {
    RankBlock& block = session_.block(rank);
    return place == kMessages ? block.core_of_messages : block.arrival[place].core;
  }
  int core_of(int rank, size_t place) const { return core(rank, place).load(std::memory_order_relaxed); }

  NodeSession& session_;
  int fair_;                    ///< the most ranks on one core when they are spread evenly
  Clock::time_point next_{};    ///< no look before that
  Clock::time_point proven_{};  ///< a move that has lasted until then was not undone
  Clock::duration pause_{};
  bool moved_ = false;  ///< whether the last search for a better core led to a move
};

}  // namespace ours
