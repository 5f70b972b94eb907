#pragma once

#include <optional>

#include "common/deadline.h"
#include "transport/arrivals.h"
#include "transport/tcp/tcp_wire.h"

namespace ours {

/// Finds out who is late to a mesh's calls. Headers carry what their senders know of the last arrivals, as time passed
/// since then. So the news of them spreads with the data, and no clocks are compared. The time on the way counts as
/// lateness; of a slow link, each end takes the other one to be late.
///
/// A frame tells more about the time when it is noticed than about the time when it came, unless this rank had just
/// looked and found nothing. Others count only until this rank has first done so, since they may have been there when
/// it made the call. When they were sent can be told if both ranks have made a call before this one: calls end on all
/// ranks at about the same time. Used with the mesh's lock held.
class TcpLateness {
 public:
  TcpLateness(int own_rank, int size) : own_rank_(own_rank), size_(size) {}

  /// Begins a call that the program made then. Nothing is noted if `arrivals` is null.
  void begin(Arrivals* arrivals, Clock::time_point called);
  void end() { ended_ = Clock::now(); }
  /// Whether this rank has just looked for frames and found none.
  void set_idle(bool idle) {
    idle_ = idle;
    began_ = began_ || idle;
  }

  /// Writes what this rank knows into a header.
  void stamp(FrameHeader& header) const;
  /// Takes in what a header of this call says.
  void hear(const FrameHeader& header);

 private:
  const int own_rank_;
  const int size_;
  Arrivals* arrivals_ = nullptr;
  Clock::time_point called_{};
  std::optional<Clock::time_point> ended_;  ///< when the call before this one did
  bool idle_ = false;
  bool began_ = false;  ///< whether this rank has looked for frames of the call, and found no more
};

}  // namespace ours
