#include "collectives/node/node_group_impl.h"

// monitored_barrier has a counter of its own: a rank that hangs in a collective must be found missing here, not be
// taken for one that called something else. Rank 0 waits for all and judges; the others wait for its verdict. Programs
// match the texts of these errors, so they keep the words that torch.distributed's users know.

namespace ours {

void NodeGroup::monitored_barrier(const Call& call, bool wait_all_ranks) {
  const uint32_t number = ++monitored_;
  const std::string within = " in " + std::to_string(call.deadline.timeout().count()) + " ms";
  session_->failure().check();
  if (rank() != 0) {
    signal(session_->self().monitor);
    if (await_monitor(0, number, call.deadline)) return;
    const char* why = session_->absence(0);
    const std::string verdict = session_->failure().failed() ? session_->failure().message()
                                : why != nullptr             ? session_->describe(0) + ' ' + why
                                                             : session_->describe(0) + " did not answer" + within;
    const std::string message =
        "Rank " + std::to_string(rank()) +
        " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0: " +
        verdict;
    session_->failure().fail(FailureKind::Timeout, message);
    throw TimeoutError(message);
  }

  if (call.deadline.passed()) {
    session_->failure().raise(FailureKind::Timeout,
                              "Rank 0 timed out in monitoredBarrier" + within +
                                  ", before any other rank could be waited for; raise the timeout");
  }
  std::string missing, details;
  for (int r = 1; r < size() && (missing.empty() || wait_all_ranks); ++r) {
    if (await_monitor(r, number, call.deadline)) continue;
    const char* why = session_->absence(r);
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    details += "; " + session_->describe(r) + ' ' + (why == nullptr ? "did not arrive" : why);
  }
  if (missing.empty()) {
    signal(session_->self().monitor);
    return;
  }
  const FailureKind kind = session_->failure().kind();
  if (kind != FailureKind::None && kind != FailureKind::Timeout) session_->failure().check();
  const std::string message = (wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" +
                              within + details + (wait_all_ranks ? "" : "; later ranks were not waited for");
  session_->failure().fail(FailureKind::Timeout, message);
  // Not the group's failure: ranks that waited as long as this one may have recorded theirs first.
  throw TimeoutError(message);
}

bool NodeGroup::await_monitor(int r, uint32_t number, Deadline deadline) {
  const auto reached = [&] {
    // Acquire: what the peer did before the barrier is visible after it. Signed, because the counter wraps.
    const uint32_t count = session_->block(r).monitor.value.load(std::memory_order_acquire);
    return static_cast<int32_t>(count - number) >= 0;
  };
  bool given_up = false;
  Interrupts interrupts;
  wait_on(
      session_->block(r).monitor, session_->wait_policy(), deadline, [&] { return given_up || reached(); },
      [&] {
        given_up = session_->failure().failed() || session_->absence(r) != nullptr || deadline.passed();
        session_->check_interrupts(interrupts, [] { return std::string("monitored_barrier"); });
      });
  return reached();
}

}  // namespace ours
