#include "transport/tcp/tcp_monitor.h"

#include <algorithm>
#include <exception>

#include "common/error.h"
#include "transport/node/node_wait.h"

namespace ours {

namespace {

std::string what() { return "monitored_barrier"; }

}  // namespace

TcpMonitor::TcpMonitor(TcpMesh& mesh, Deadline deadline, uint64_t number)
    : mesh_(mesh), endpoint_(mesh.endpoint()), deadline_(deadline), number_(number), lock_(mesh.lock()) {
  // A call on another thread may have to look around while this one holds the mesh.
  mesh_.wake();
}

void TcpMonitor::tell(int rank) {
  FrameHeader header;
  header.kind = FrameKind::Monitor;
  header.call = number_;
  endpoint_.connections().control(rank).post_send(header, std::string());
}

std::string TcpMonitor::await(int rank, bool tell_first) {
  const TcpConnections& connections = endpoint_.connections();
  try {
    Interrupts interrupts;
    endpoint_.reach(lock_, rank, deadline_, what);
    if (tell_first) tell(rank);
    while (true) {
      const bool moved = endpoint_.progress();
      if (endpoint_.calls().reached_monitor(rank, number_)) return "";
      if (mesh_.failure().failed()) return mesh_.failure().message();
      if (connections.left(rank)) return connections.absence(rank);
      endpoint_.check();
      const auto now = Clock::now();
      if (now >= deadline_.at()) return kLate;
      endpoint_.check_interrupts(lock_, interrupts, what);
      if (moved || connections.anything_ready()) continue;
      endpoint_.sleep(lock_, std::min<Clock::duration>(deadline_.at() - now, kLookAround));
    }
  } catch (const TimeoutError&) {
    return kLate;
  } catch (const Error& e) {
    return e.what();
  }
}

void TcpMonitor::flush() {
  try {
    endpoint_.progress();
  } catch (const Error&) {
    // The barrier was passed; the next call will learn of the failure.
  }
}

}  // namespace ours
