#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend/callback.h"
#include "backend/lane.h"

namespace ours {

/// The lanes for collectives that are started inside callbacks. These cannot share sequence numbers with the
/// collectives that the program starts, because whether a callback runs before or after the program's next call is a
/// matter of timing, which differs between ranks. So they use connections of their own, in the order in which the
/// callbacks were attached. Callbacks on another group's futures get a separate lane, since the callbacks of two groups
/// have no common order.
class CallbackLanes {
 public:
  /// `meeting`: where the ranks of `whole`, the lane for what the program calls, have met.
  CallbackLanes(std::shared_ptr<Lane> whole, Meeting meeting)
      : whole_(std::move(whole)), meeting_(std::move(meeting)) {}

  /// Waits for the callback's turn, and returns the lane for what it starts, of which `op` is next. All ranks open a
  /// lane when they first need it.
  Lane& lane_of(const Callback& callback, Op op, std::chrono::milliseconds timeout);

  /// The lanes that are open.
  std::vector<std::shared_ptr<Lane>> all() const;

 private:
  /// Connections for what the callbacks of one order start, so that all ranks number it alike.
  struct Place {
    std::mutex opening;          // held by the thread that opens the lane
    std::shared_ptr<Lane> lane;  // guarded by mutex_; null until it is open
  };

  std::shared_ptr<Lane> open(const std::string& name, const std::string& what, std::chrono::milliseconds timeout) const;

  const std::shared_ptr<Lane> whole_;
  const Meeting meeting_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Place>> places_;  // guarded by mutex_
};

}  // namespace ours
