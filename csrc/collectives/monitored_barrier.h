#pragma once

#include <string>
#include <vector>

#include "collectives/call.h"

namespace ours {

/// One monitored barrier of this rank. All tell rank 0 that they have arrived; rank 0 waits for all and then tells them
/// its verdict. This is independent of the other calls: a rank that hangs in one of them must be reported missing here,
/// and not as one that called something else. A kind of group implements the messages.
class MonitoredBarrier {
 public:
  MonitoredBarrier(int rank, int size) : rank_(rank), size_(size) {}
  virtual ~MonitoredBarrier() = default;

  /// See Group::monitored_barrier().
  void run(const Call& call, bool wait_all_ranks);

 protected:
  static constexpr const char* kLate = "late";

  virtual std::string describe(int rank) = 0;
  /// Says where those ranks are in their programs (see roll_call()); empty if that cannot be found out.
  virtual std::string call_roll(const std::vector<int>& /*ranks*/) { return ""; }
  /// Tells rank 0 that this rank has arrived, or, on rank 0, all others that all have.
  virtual void announce() = 0;
  /// Waits until `rank` has announced. Returns a sentence that says why it will not, kLate if it has not in time, or
  /// nothing if it has.
  virtual std::string await(int rank) = 0;
  /// Throws the group's failure, if there is one.
  virtual void check() = 0;
  /// Makes a timeout the group's failure, unless there is one.
  virtual void fail(const std::string& message) = 0;

  const int rank_;
  const int size_;

 private:
  [[noreturn]] void time_out(const std::string& message);
};

}  // namespace ours
