#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "common/deadline.h"
#include "transport/arrivals.h"

namespace ours {

/// What the collectives of a group have cost this rank. All times are in microseconds.
struct StragglerTally {
  int64_t elapsed = 0;  ///< from the first call to the end of the last one
  int64_t blocked = 0;  ///< in which the program waited for collectives to end
  uint64_t calls = 0;
  uint64_t bytes = 0;          ///< of this rank's tensors
  std::vector<int64_t> late;   ///< by rank: how much sooner this rank would be here if that one never were the last
  std::vector<uint64_t> last;  ///< by rank: in how many calls it was the last to arrive

  /// What came after `earlier`.
  StragglerTally since(const StragglerTally& earlier) const;
};

/// Adds up what it costs to wait for each of a group's ranks, while they work.
///
/// Let rank r be the last to arrive at a collective. If it had come with the last of the others, the collective would
/// have begun sooner, by the gap between the two. That time is not simply saved: without it, the collective before
/// might not have ended yet, and the program may have had other work to do meanwhile. So for each rank the ledger keeps
/// a lead, by which the last collective would have ended sooner without that rank's lateness:
///
///     lead = max(e, a) - max(e - lead, a')
///
/// where e is the end of the collective before, a the last arrival, and a' the last arrival of other ranks. When the
/// program waits, the lead is spent as far as the program was blocked, and so much has been saved.
///
/// Calls come one after another; waits and questions may come from any thread.
class StragglerLedger {
 public:
  /// A call that has ended.
  struct Entry {
    Clock::time_point called;  ///< by the program
    Clock::time_point ended;
    uint64_t bytes;
    uint64_t made = 0;  ///< how many calls the program has made, if it waited for this one all that time; otherwise 0
  };

  StragglerLedger(int rank, int size);

  /// Called before each call, and again if it could not begin. Returns where to note when the ranks make it.
  Arrivals& begin() {
    arrivals_.begin(rank_);
    return arrivals_;
  }
  /// Called after it.
  void add(const Entry& call);
  /// The program, which has made `made` calls so far, has waited so long for some of them, perhaps not at all.
  void waited(Clock::duration time, uint64_t made);

  /// Everything so far.
  StragglerTally total() const;
  /// The last 30 to 60 seconds.
  StragglerTally recent() const;

 private:
  /// What waited() does. Called with the lock.
  void spend(int64_t blocked, uint64_t made);
  /// The last rank arrived then, and all others had by `others`.
  void update_leads(size_t slowest, int64_t last, int64_t others);

  const int rank_;
  Arrivals arrivals_;
  mutable std::mutex mutex_;  // guards all below
  std::vector<int64_t> leads_;
  std::atomic<bool> leading_{false};  ///< whether any lead is not 0; looked at without the lock, too
  int64_t began_ = 0;
  int64_t ended_ = 0;
  StragglerTally total_;
  std::array<StragglerTally, 2> marks_;  ///< earlier totals, 30 seconds apart
};

}  // namespace ours
