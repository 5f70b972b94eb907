#pragma once

#include <memory>
#include <string>
#include <vector>

#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_handshake.h"

namespace ours::testing {

/// A rank 0 whose connections a test uses as it likes. It connects to the others, because of two ranks that connect
/// to each other, the lower one's connection counts.
class Puppet {
 public:
  /// With that many streams for data.
  Puppet(int size, std::shared_ptr<MapKeys> keys, int data_streams = 1);

  /// Connects all streams to `rank`, which must be in a call or looking.
  void connect(int rank);

  /// The connection of that stream to the rank that was connected to first.
  int fd(int stream) const { return fds_[static_cast<size_t>(stream)].get(); }

  void send(int stream, const void* data, size_t bytes);

  /// Waits for that many bytes, at most for 10 seconds.
  std::string receive(int stream, size_t bytes);

  /// Closes everything, as the system does when a process is killed; `abruptly`: with a reset instead of an end.
  void die(bool abruptly);

 private:
  std::shared_ptr<MapKeys> keys_;
  TcpSelf self_;
  TcpTerms terms_;
  ProcessFd listener_;
  std::vector<ProcessFd> fds_;
};

/// Ranks 1 to n - 1 of a group whose rank 0 is a puppet, by rank.
Meshes join_others(int n, const std::shared_ptr<MapKeys>& keys);

}  // namespace ours::testing
