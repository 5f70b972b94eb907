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
    : mesh_(mesh), deadline_(deadline), number_(number), lock_(mesh.lock()) {
  // A call on another thread may have to look around while this one holds the mesh.
  mesh_.wake();
}

void TcpMonitor::tell(int rank) {
  FrameHeader header;
  header.kind = FrameKind::Monitor;
  header.call = number_;
  mesh_.control(rank).post_send(header, std::string());
}

std::string TcpMonitor::await(int rank, bool tell_first) {
  try {
    Interrupts interrupts;
    mesh_.reach(lock_, rank, deadline_, what);
    if (tell_first) tell(rank);
    while (true) {
      const bool moved = mesh_.progress();
      if (mesh_.calls().reached_monitor(rank, number_)) return "";
      if (mesh_.failure().failed()) return mesh_.failure().message();
      if (mesh_.has_left(rank)) return mesh_.absence(rank);
      mesh_.check();
      const auto now = Clock::now();
      if (now >= deadline_.at()) return kLate;
      mesh_.check_interrupts(lock_, interrupts, what);
      if (moved || mesh_.anything_ready()) continue;
      mesh_.sleep(lock_, std::min<Clock::duration>(deadline_.at() - now, kLookAround));
    }
  } catch (const TimeoutError&) {
    return kLate;
  } catch (const Error& e) {
    return e.what();
  }
}

void TcpMonitor::flush() {
  try {
    mesh_.progress();
  } catch (const Error&) {
    // The barrier was passed; the next call will hear of it.
  }
}

}  // namespace ours
