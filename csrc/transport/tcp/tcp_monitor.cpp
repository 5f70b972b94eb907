#include "transport/tcp/tcp_monitor.h"

#include <algorithm>
#include <exception>

#include "common/error.h"
#include "transport/node/node_wait.h"

namespace ours {

namespace {

const std::function<std::string()>& what() {
  static const std::function<std::string()> kWhat = [] { return std::string("monitored_barrier"); };
  return kWhat;
}

}  // namespace

TcpMonitor::TcpMonitor(TcpMesh& mesh, Deadline deadline, uint64_t number)
    : mesh_(mesh), deadline_(deadline), number_(number), lock_(mesh.mutex_) {
  // A call on another thread may have to look around while this one holds the mesh.
  mesh_.wake();
}

void TcpMonitor::post(int rank) {
  FrameHeader header;
  header.kind = FrameKind::Monitor;
  header.call = number_;
  mesh_.slot(rank, 0).stream.post_send(header, std::string());
}

void TcpMonitor::tell(int rank) { post(rank); }

std::string TcpMonitor::await(int rank, bool tell_first) {
  try {
    Interrupts interrupts;
    mesh_.need(rank, lock_, deadline_, what());
    if (tell_first) post(rank);
    while (true) {
      const bool moved = mesh_.progress();
      if (mesh_.peer(rank).monitor >= number_) return "";
      if (mesh_.failure_.failed()) return mesh_.failure_.message();
      if (mesh_.left_.load()) return "this rank has left the group";
      if (mesh_.peer(rank).left) return "left the group (it destroyed it or ended before the others did)";
      mesh_.check_peers();
      const auto now = Clock::now();
      if (now >= deadline_.at()) return kLate;
      mesh_.check_interrupts(lock_, interrupts, what());
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
