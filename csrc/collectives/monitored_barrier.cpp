#include "collectives/monitored_barrier.h"

#include <string>

#include "common/error.h"

// Programs match the texts of these errors, so they keep the words of torch.distributed.

namespace ours {

void MonitoredBarrier::time_out(const std::string& message) {
  fail(message);
  // Not the group's failure: ranks that waited as long as this one may have recorded theirs first.
  throw TimeoutError(message);
}

void MonitoredBarrier::run(const Call& call, bool wait_all_ranks) {
  const std::string within = " in " + std::to_string(call.deadline.timeout().count()) + " ms";
  if (rank_ != 0) {
    announce();
    const std::string why = await(0);
    if (why.empty()) return;
    time_out("Rank " + std::to_string(rank_) +
             " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0: " +
             (why == kLate ? describe(0) + " did not answer" + within + call_roll({0}) : why));
  }
  if (call.deadline.passed()) {
    time_out("Rank 0 timed out in monitoredBarrier" + within +
             ", before any other rank could be waited for; raise the timeout");
  }
  std::string missing;  // all of them, since programs read this text
  std::string details;
  std::vector<int> late;
  for (int r = 1; r < size_ && (missing.empty() || wait_all_ranks); ++r) {
    const std::string why = await(r);
    if (why.empty()) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    if (why == kLate) late.push_back(r);
    details += "; " + (why == kLate ? describe(r) + " did not arrive" : why);
  }
  if (missing.empty()) return announce();
  try {
    check();
  } catch (const TimeoutError&) {
    // Of a rank that waited as long as this one, which knows more.
  }
  time_out((wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" + within + details +
           (wait_all_ranks ? "" : "; later ranks were not waited for") + call_roll(late));
}

}  // namespace ours
