#include "collectives/tcp/tcp_group_impl.h"
#include "transport/tcp/tcp_monitor.h"

// monitored_barrier is independent of the numbers of the other calls: a rank that hangs in one of them must be found
// missing here. All tell rank 0 that they have arrived, which waits for all and then tells them its verdict. Programs
// match the texts of these errors, so they keep the words that torch.distributed's users know.

namespace ours {

void TcpGroup::monitored_barrier(const Call& call, bool wait_all_ranks) {
  mesh_->check_usable();
  const uint64_t number = ++monitored_;
  const std::string within = " in " + std::to_string(call.deadline.timeout().count()) + " ms";
  TcpMonitor monitor(*mesh_, call.deadline, number);
  if (rank() != 0) {
    const std::string why = monitor.await(0, true);
    if (why.empty()) return;
    const std::string message =
        "Rank " + std::to_string(rank()) +
        " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0: " +
        (why == TcpMonitor::kLate ? monitor.describe(0) + " did not answer" + within : why);
    mesh_->fail(FailureKind::Timeout, message);
    throw TimeoutError(message);
  }

  if (call.deadline.passed()) {
    const std::string message = "Rank 0 timed out in monitoredBarrier" + within +
                                ", before any other rank could be waited for; raise the timeout";
    mesh_->fail(FailureKind::Timeout, message);
    throw TimeoutError(message);
  }
  std::string missing, details;
  for (int r = 1; r < size() && (missing.empty() || wait_all_ranks); ++r) {
    const std::string why = monitor.await(r, false);
    if (why.empty()) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    details += "; " + monitor.describe(r) + (why == TcpMonitor::kLate ? " did not arrive" : ": " + why);
  }
  if (missing.empty()) {
    for (int r = 1; r < size(); ++r) monitor.tell(r);
    monitor.flush();
    return;
  }
  const FailureKind kind = mesh_->failure().kind();
  if (kind != FailureKind::None && kind != FailureKind::Timeout) mesh_->failure().check();
  const std::string message = (wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" +
                              within + details + (wait_all_ranks ? "" : "; later ranks were not waited for");
  mesh_->fail(FailureKind::Timeout, message);
  // Not the group's failure: ranks that waited as long as this one may have recorded theirs first.
  throw TimeoutError(message);
}

}  // namespace ours
