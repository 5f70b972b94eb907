#pragma once

#include <chrono>
#include <string>

namespace ours {

/// Chooses the congestion control of connections: the one that was asked for, otherwise the system's. If the system's
/// is BBR, connections with short round trips get a loss-based one instead.
///
/// BBR keeps one bandwidth-delay product in flight: its highest measured rate times its minimum round trip. Within a
/// data centre round trips take microseconds, while collectives fill the queues of links for milliseconds: a
/// connection that meets such a queue measures a low rate, paces itself by it, and then measures a still lower one.
/// All ranks wait for the slowest connection.
/// Between sites, where the round trip is longer than the queues and single packets get lost, BBR is the better choice.
class TcpCongestion {
 public:
  /// The names that a system offers.
  struct System {
    std::string usual;    ///< what connections have if nothing is asked for
    std::string allowed;  ///< names that this process may ask for, with spaces between them

    /// Those of the network of this thread.
    static System here();
  };

  /// `asked`: see OURS_TCP_CONGESTION.
  explicit TcpCongestion(const std::string& asked, const System& system = System::here(),
                         std::chrono::microseconds near = std::chrono::milliseconds(1));

  /// For sockets whose path is not known yet. Empty means the system's.
  const std::string& at_first() const { return near_; }

  /// For connections with that round trip.
  const std::string& choose(std::chrono::microseconds round_trip) const {
    return round_trip <= longest_ ? near_ : far_;
  }

  /// Sets an open connection's congestion control by its minimum round-trip time. Returns false if a later call may
  /// choose differently, because queueing may so far have hidden that the peer is near.
  bool settle(int fd) const;

 private:
  std::chrono::microseconds longest_;  ///< round trip of what is near
  std::string near_;
  std::string far_;
};

}  // namespace ours
