#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/tcp/tcp_wire.h"

namespace ours {

/// The addresses of a peer, in the order in which they are tried.
class TcpAddresses {
 public:
  /// Those of its card that lead to it from this machine.
  void take(const TcpCard& card, const std::string& machine) {
    all_.clear();
    mesh_ = card.mesh;
    for (const bool loopback : {false, true}) {
      for (const SocketAddress& address : card.addresses) {
        // Another machine's loopback address would lead to this machine.
        if (address.is_loopback() == loopback && (!loopback || card.machine == machine)) all_.push_back(address);
      }
    }
    paths_ = std::min(card.paths, all_.size());
  }

  const std::vector<SocketAddress>& all() const { return all_; }
  /// The number of its mesh there.
  uint32_t mesh() const { return mesh_; }

  /// The number of the address that a stream tries first; stream 0 is for control. The streams use the paths in turn,
  /// and those of different ranks of a node (`lower`, of the two that are connected) begin with different ones, so that
  /// few streams of each use all.
  size_t first(int stream, int lower) const {
    return stream == 0 ? 0 : static_cast<size_t>(lower + stream - 1) % std::max(paths_, size_t{1});
  }

 private:
  std::vector<SocketAddress> all_;
  size_t paths_ = 0;
  uint32_t mesh_ = 0;
};

}  // namespace ours
