#pragma once

#include <map>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "common/deadline.h"
#include "common/process_watch.h"

namespace ours {

/// What keeps the ranks of a new group from coming together: an error that one of them reports, or the death of one.
/// Each rank says in the store that it is there, and watches those of its machine; whoever sees one die reports it to
/// all. Used by the threads that ask the store, one after another.
class Trouble {
 public:
  /// `prefix`: of this attempt's keys. `self` is how this rank is called, "rank 2 (host node1, pid 4711)"; `group` what
  /// the ranks are about to make.
  Trouble(std::string prefix, std::string self, std::string group);

  /// Says to the others of this machine that this rank is there.
  void announce(c10d::Store& store);

  /// Throws the error that a rank has reported, or PeerError where one of this machine has died, which it reports.
  void check(c10d::Store& store);

  /// Reports an error, unless there is one. Returns the one that there is.
  std::string report(c10d::Store& store, const std::string& message);

 private:
  struct Neighbour {
    std::string name;
    ProcessWatch watch;
  };

  void meet(c10d::Store& store);

  const std::string prefix_;
  const std::string self_;
  const std::string group_;
  std::mutex mutex_;                     // guards all below
  std::map<int, Neighbour> neighbours_;  // by the order in which they came
  Clock::time_point next_look_{};
};

}  // namespace ours
