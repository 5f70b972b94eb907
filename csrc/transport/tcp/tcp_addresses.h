#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "transport/tcp/tcp_wire.h"

namespace ours {

/// The addresses of a peer, in the order in which they are tried.
class TcpAddresses {
 public:
  TcpAddresses() = default;
  /// Those on the peer's card that lead to it from the machine of the card `own`.
  TcpAddresses(const TcpCard& card, const TcpCard& own) : mesh_(card.mesh) {
    size_t paths = 0;
    for (const bool loopback : {false, true}) {
      for (size_t i = 0; i < card.addresses.size(); ++i) {
        // Another machine's loopback address would lead to this machine.
        if (card.addresses[i].is_loopback() != loopback || (loopback && card.machine != own.machine)) continue;
        all_.push_back(card.addresses[i]);
        if (!loopback && i < card.paths) ++paths;
      }
    }
    // A rank that is on fewer of them might reach the others only by a detour.
    paths_ = std::max(std::min(paths, own.paths), size_t{1});
  }

  const std::vector<SocketAddress>& all() const { return all_; }
  /// The number of its mesh there.
  uint32_t mesh() const { return mesh_; }

  /// The number of the address that a stream tries first; stream 0 is for control. `lower`: the lower of the two ranks
  /// that it connects, so that both choose alike. Streams use the paths in turn, and pairs of ranks begin with
  /// different ones, so that a few streams of each use all.
  size_t first(int stream, int lower) const {
    return stream == 0 ? 0 : static_cast<size_t>(lower + stream - 1) % paths_;
  }

 private:
  std::vector<SocketAddress> all_;
  size_t paths_ = 1;
  uint32_t mesh_ = 0;
};

}  // namespace ours
