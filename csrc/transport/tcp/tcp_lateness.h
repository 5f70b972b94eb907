#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "common/deadline.h"
#include "transport/arrivals.h"
#include "transport/tcp/tcp_wire.h"

namespace ours {

/// Finds out who is late to a mesh's calls, and whether the rank or the network is to blame. All headers carry what the
/// sender knows of the arrivals, as time passed since then; so the news of the last ones spreads with the data, and no
/// clocks are compared.
///
/// A frame tells more about the time when it is noticed than about the time when it came, unless this rank had just
/// looked and found nothing. Only such frames count.
///
/// A late rank lets others wait and waits for nobody, but a slow link lets both of its ends wait. So each rank tells
/// its peers how long it waited for them in the call before, and the smaller of the two times is the link's. Used with
/// the mesh's lock held.
class TcpLateness {
 public:
  /// Begins a call that the program made then. Nothing is noted if `arrivals` is null.
  void begin(Arrivals* arrivals, Clock::time_point called);

  /// This rank has looked for frames at that time and found none; nothing: it does something else.
  void set_idle(std::optional<Clock::time_point> since) { idle_since_ = since; }
  bool is_idle() const { return idle_since_.has_value(); }

  /// Writes what this rank knows into a header for `peer`.
  void stamp(int peer, FrameHeader& header);
  /// Takes in a header of this call. `own`: this rank; `size`: the number of ranks.
  void hear(int peer, const FrameHeader& header, int own, int size);

 private:
  struct Peer {
    bool heard = false;         ///< in this call
    int64_t waited = 0;         ///< for its frames in this call, in microseconds
    int64_t waits = 0;          ///< how often
    int64_t waited_before = 0;  ///< in the call before
    int64_t waits_before = 0;
    int64_t transit = 0;  ///< an average of what a frame's way has taken
  };

  void hear_link(int peer, const FrameHeader& header);

  Arrivals* arrivals_ = nullptr;
  Clock::time_point called_{};
  std::optional<Clock::time_point> idle_since_;
  std::map<int, Peer> peers_;
};

}  // namespace ours
