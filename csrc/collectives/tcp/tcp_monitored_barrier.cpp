#include "collectives/tcp/tcp_algorithms.h"
#include "common/error.h"
#include "transport/tcp/tcp_monitor.h"

// monitored_barrier is independent of the numbers of the other calls: a rank that hangs in one of them must be
// reported missing here. All tell rank 0 that they have arrived; rank 0 waits for all and then tells them its
// verdict. Programs match the texts of these errors, so they keep the words of torch.distributed.

namespace ours::tcp {

void monitored_barrier(TcpMesh& mesh, const Call& call, uint64_t number, bool wait_all_ranks) {
  const std::string within = " in " + std::to_string(call.deadline.timeout().count()) + " ms";
  TcpMonitor monitor(mesh, call.deadline, number);
  if (mesh.rank() != 0) {
    const std::string why = monitor.await(0, true);
    if (why.empty()) return;
    const std::string message =
        "Rank " + std::to_string(mesh.rank()) +
        " successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0: " +
        (why == TcpMonitor::kLate ? monitor.describe(0) + " did not answer" + within : why);
    mesh.fail(FailureKind::Timeout, message);
    throw TimeoutError(message);
  }

  if (call.deadline.passed()) {
    const std::string message = "Rank 0 timed out in monitoredBarrier" + within +
                                ", before any other rank could be waited for; raise the timeout";
    mesh.fail(FailureKind::Timeout, message);
    throw TimeoutError(message);
  }
  std::string missing, details;
  for (int r = 1; r < mesh.size() && (missing.empty() || wait_all_ranks); ++r) {
    const std::string why = monitor.await(r, false);
    if (why.empty()) continue;
    missing += (missing.empty() ? "" : ", ") + std::to_string(r);
    details += "; " + monitor.describe(r) + (why == TcpMonitor::kLate ? " did not arrive" : ": " + why);
  }
  if (missing.empty()) {
    for (int r = 1; r < mesh.size(); ++r) monitor.tell(r);
    monitor.flush();
    return;
  }
  const FailureKind kind = mesh.failure().kind();
  if (kind != FailureKind::None && kind != FailureKind::Timeout) mesh.failure().check();
  const std::string message = (wait_all_ranks ? "Ranks " : "Rank ") + missing + " failed to pass monitoredBarrier" +
                              within + details + (wait_all_ranks ? "" : "; later ranks were not waited for");
  mesh.fail(FailureKind::Timeout, message);
  // This is not the group's failure: ranks that waited as long as this one may have recorded theirs first.
  throw TimeoutError(message);
}

}  // namespace ours::tcp
