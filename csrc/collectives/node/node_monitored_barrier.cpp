#include "collectives/node/node_algorithms.h"
#include "common/error.h"

// monitored_barrier has a counter of its own: a rank that hangs in a collective must be reported missing here, and
// not as one that called something else. Rank 0 waits for all and judges; the others wait for its verdict. Programs
// match the texts of these errors, so they keep the words of torch.distributed.

namespace ours::node {

namespace {

/// Waits for rank r's monitored barrier of that number; false if it will not come, or not in time.
bool await(NodeSession& session, int r, uint32_t number, Deadline deadline) {
  const auto reached = [&] {
    // Acquire: what the peer did before the barrier is visible after it. Signed, because the counter wraps.
    const uint32_t count = session.block(r).monitor.value.load(std::memory_order_acquire);
    return static_cast<int32_t>(count - number) >= 0;
  };
  bool given_up = false;
  Interrupts interrupts;
  wait_on(
      session.block(r).monitor, session.wait_policy(), deadline, [&] { return given_up || reached(); },
      [&] {
        given_up = session.failure().failed() || session.absence(r) != nullptr || deadline.passed();
        session.check_interrupts(interrupts, [] { return std::string("monitored_barrier"); });
      });
  return reached();
}

}  // namespace

void monitored_barrier(NodeSession& session, const Call& call, uint32_t number, bool wait_all_ranks) {
  const std::string within = " in " + std::to_string(call.deadline.timeout().count()) + " ms";
  session.failure().check();
  if (session.rank() != 0) {
    signal(session.self().monitor);
    if (await(session, 0, number, call.deadline)) return;
    const char* why = session.absence(0);
    const std::string verdict = session.failure().failed() ? session.failure().message()
                                : why != nullptr           ? session.describe(0) + ' ' + why
                                                           : session.describe(0) + " did not answer" + within;
    const std::string message =
        "Rank " + std::to_string(session.rank()) +
        " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0: " +
        verdict;
    session.failure().fail(FailureKind::Timeout, message);
    throw TimeoutError(message);
  }

  if (call.deadline.passed()) {
    session.failure().raise(FailureKind::Timeout, "Rank 0 timed out in monitoredBarrier" + within +
                                                      ", before any other rank could be waited for; raise the timeout");
  }
  std::string missing, details;
  for (int r = 1; r < session.size() && (missing.empty() || wait_all_ranks); ++r) {
    if (await(session, r, number, call.deadline)) continue;
    const char* why = session.absence(r);
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    details += "; " + session.describe(r) + ' ' + (why == nullptr ? "did not arrive" : why);
  }
  if (missing.empty()) {
    signal(session.self().monitor);
    return;
  }
  const FailureKind kind = session.failure().kind();
  if (kind != FailureKind::None && kind != FailureKind::Timeout) session.failure().check();
  const std::string message = (wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" +
                              within + details + (wait_all_ranks ? "" : "; later ranks were not waited for");
  session.failure().fail(FailureKind::Timeout, message);
  // This is not the group's failure: ranks that waited as long as this one may have recorded theirs first.
  throw TimeoutError(message);
}

}  // namespace ours::node
