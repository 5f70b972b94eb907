#pragma once

#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "common/deadline.h"
#include "common/process_watch.h"
#include "transport/failure_kind.h"

namespace ours {

/// Watches for what can keep the ranks of a new group from coming together: an error that a rank reports, a timeout for
/// example, or the death of a rank, which the ranks of its machine notice and report.
class JoinMonitor {
 public:
  /// `prefix` begins this attempt's keys. `self` names this rank, as in "rank 2 (host node1, pid 4711)". `group` is the
  /// name of the group in messages.
  JoinMonitor(std::string prefix, std::string self, std::string group);

  /// Announces this rank to the other ranks of its machine.
  void announce(c10d::Store& store);

  /// Throws the error that a rank has reported. If a rank of this machine has died, reports that, and throws PeerError.
  /// Looks only if the last look (before the first one, the construction) was a while ago, or `at_once`.
  void check(c10d::Store& store, bool at_once = false);

  /// An error as a text in the store, and what throws it.
  static std::string text_of(FailureKind kind, const std::string& message);
  [[noreturn]] static void raise(const std::string& report);

  /// Reports such a text, unless there is one already. Returns the one that is in force.
  std::string report(c10d::Store& store, const std::string& message);

 private:
  struct Neighbour {
    std::string name;
    ProcessWatch watch;
  };

  /// Starts to watch the ranks of this machine that have announced themselves since the last call.
  void find_neighbours(c10d::Store& store);

  const std::string prefix_;
  const std::string self_;
  const std::string group_;
  std::mutex mutex_;                  // guards all below
  size_t counted_ = 0;                // ranks of this machine
  std::vector<std::string> awaited_;  // keys of those that have been counted and not announced themselves
  std::vector<Neighbour> neighbours_;
  Clock::time_point next_check_;
};

}  // namespace ours
