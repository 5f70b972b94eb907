#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "transport/group_failure.h"
#include "transport/tcp/tcp_connections.h"
#include "transport/tcp/tcp_poller.h"

namespace ours {

/// Passes the failure of a rank's group on to its peers. A rank whose group fails says so on all its connections, and
/// each rank that hears it does the same. So the failure reaches every rank that is in a call along the connections
/// that it waits on. A rank that connects later is told by the thread in run(). Used with the mesh's lock held.
class TcpFailurePropagation {
 public:
  TcpFailurePropagation(const GroupFailure& failure, TcpConnections& connections, TcpPoller& poller, int own_rank,
                        int size);

  /// Tells the connected peers that have not been told.
  void tell();
  bool has_told(int rank) const { return told_[static_cast<size_t>(rank)]; }

  /// Tells the peers that connect, until this rank has left and either all have been told or some time has passed.
  void run(std::unique_lock<std::mutex>& lock, const std::atomic<bool>& left);

 private:
  bool all_know();

  const GroupFailure& failure_;
  TcpConnections& connections_;
  TcpPoller& poller_;
  std::vector<bool> told_;  ///< by rank; this one knows
};

}  // namespace ours
