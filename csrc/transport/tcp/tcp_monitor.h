#pragma once

#include <string>

#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// The messages of one monitored barrier, which are independent of the calls of TcpCall and may be exchanged while
/// one is under way on another thread. Holds the mesh's lock while it lives, except while it waits.
class TcpMonitor {
 public:
  static constexpr const char* kLate = "late";

  TcpMonitor(TcpMesh& mesh, Deadline deadline, uint64_t number);

  /// Tells `rank` that this rank has arrived (rank 0: that all have).
  void tell(int rank);

  /// Waits until `rank` has told this rank, telling it first if asked to. Returns why `rank` will not do so, kLate if
  /// it did not in time, or nothing if it did.
  std::string await(int rank, bool tell_first);

  /// Hands all posted messages to the system.
  void flush();

  std::string describe(int rank) const { return mesh_.describe(rank); }

 private:
  TcpMesh& mesh_;
  TcpEndpoint& endpoint_;
  const Deadline deadline_;
  const uint64_t number_;
  TcpMesh::Lock lock_;
};

}  // namespace ours
