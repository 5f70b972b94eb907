#include <algorithm>

#include "collectives/monitored_barrier.h"
#include "collectives/tcp/tcp_algorithms.h"
#include "common/error.h"

// The messages travel on the connections for control, beside those of a call that is under way on another thread.

namespace ours::tcp {

namespace {

std::string what() { return "monitored_barrier"; }

/// Holds the mesh's lock while it lives, except while it waits.
class Barrier final : public MonitoredBarrier {
 public:
  Barrier(TcpMesh& mesh, Deadline deadline, uint64_t number)
      : MonitoredBarrier(mesh.rank(), mesh.size()),
        mesh_(mesh),
        endpoint_(mesh.endpoint()),
        deadline_(deadline),
        number_(number),
        waiting_(mesh),
        lock_(mesh.use()) {
    // A call on another thread may have to look around while this one holds the mesh.
    mesh_.wake();
  }

 protected:
  std::string describe(int rank) override { return mesh_.describe(rank); }
  std::string call_roll(const std::vector<int>& ranks) override {
    return endpoint_.call_roll({ranks.begin(), ranks.end()});
  }
  void check() override { mesh_.failure().check(); }
  void fail(const std::string& message) override { mesh_.fail(FailureKind::Timeout, message); }

  void announce() override {
    FrameHeader header;
    header.kind = FrameKind::Monitor;
    header.call = number_;
    for (int r = 0; r < size_; ++r) {
      if ((r == 0) != (rank_ == 0)) endpoint_.connections().control(r).post_send(header, std::string());
    }
    try {
      // A connection may be kept back while its peer answers an offer to close it. The peers are in the barrier.
      while (true) {
        endpoint_.progress();
        if (rank_ != 0 || endpoint_.connections().flush_control() || deadline_.passed()) break;
        endpoint_.check();
        endpoint_.sleep(lock_, kLookAround);
      }
    } catch (const Error&) {
      // The wait that follows, or the next call, will learn of the failure.
    }
  }

  std::string await(int rank) override {
    const TcpConnections& connections = endpoint_.connections();
    try {
      Interrupts interrupts;
      endpoint_.reach(lock_, rank, deadline_, what);
      while (true) {
        const bool moved = endpoint_.progress();
        if (endpoint_.calls().reached_monitor(rank, number_)) return "";
        if (connections.left(rank)) {
          return describe(rank) + ' ' + connections.absence(rank) + connections.reason(rank);
        }
        endpoint_.check();
        const auto now = Clock::now();
        if (now >= deadline_.at()) return kLate;
        endpoint_.check_interrupts(lock_, interrupts, what);
        if (moved || connections.anything_ready()) continue;
        endpoint_.sleep(lock_, std::min<Clock::duration>(deadline_.at() - now, kLookAround));
      }
    } catch (const Error& e) {
      // The verdict of rank 0 is a timeout, too.
      return dynamic_cast<const TimeoutError*>(&e) != nullptr && !(rank == 0 && mesh_.failure().failed()) ? kLate
                                                                                                          : e.what();
    }
  }

 private:
  TcpMesh& mesh_;
  TcpEndpoint& endpoint_;
  const Deadline deadline_;
  const uint64_t number_;
  const TcpMesh::Waiting waiting_;
  TcpMesh::Lock lock_;
};

}  // namespace

void monitored_barrier(TcpMesh& mesh, const Call& call, uint64_t number, bool wait_all_ranks) {
  Barrier(mesh, call.deadline, number).run(call, wait_all_ranks);
}

}  // namespace ours::tcp
