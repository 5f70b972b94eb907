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
    for (const bool loopback : {false, true}) {
      for (const SocketAddress& address : card.addresses) {
        // Another machine's loopback address would lead to this machine.
        if (address.is_loopback() == loopback && (!loopback || card.machine == own.machine)) all_.push_back(address);
      }
    }
    // A rank that is on fewer of them might reach the others only by a detour.
    paths_ = std::max(std::min(paths_of(card), paths_of(own)), size_t{1});
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
  /// Loopback is none.
  static size_t paths_of(const TcpCard& card) {
    const auto end = card.addresses.begin() + static_cast<std::ptrdiff_t>(std::min(card.paths, card.addresses.size()));
    return static_cast<size_t>(
        std::count_if(card.addresses.begin(), end, [](const auto& address) { return !address.is_loopback(); }));
  }

  std::vector<SocketAddress> all_;
  size_t paths_ = 1;
  uint32_t mesh_ = 0;
};

}  // namespace ours
