#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/deadline.h"
#include "common/interval.h"

namespace ours {

/// When the ranks made a call, as far as this rank knows: microseconds after it did so itself, so that the times mean
/// something without a common clock. Thread-safe, but for begin(): while a rank's call is under way, another thread may
/// hear of it from peers.
class Arrivals {
 public:
  explicit Arrivals(int size) : at_(static_cast<size_t>(size)) {}

  /// Begins a call of rank `own`.
  void begin(int own) {
    for (auto& one : at_) one.store(kUnknown, std::memory_order_relaxed);
    note(own, 0);
  }

  /// Takes in that a rank had arrived by then. What is heard later may say that it was sooner.
  void note(int rank, int64_t at) {
    auto& known = at_[static_cast<size_t>(rank)];
    int64_t was = known.load(std::memory_order_relaxed);
    while (at < was && !known.compare_exchange_weak(was, at, std::memory_order_relaxed)) {
    }
  }

  /// The last rank of those that are known, except `but`; -1: there is none.
  int last(int but = -1) const {
    int last = -1;
    for (int r = 0; r < static_cast<int>(at_.size()); ++r) {
      if (r != but && at(r) != kUnknown && (last < 0 || at(r) > at(last))) last = r;
    }
    return last;
  }

  /// For a rank that is known.
  int64_t at(int rank) const { return at_[static_cast<size_t>(rank)].load(std::memory_order_relaxed); }

 private:
  static constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();

  std::vector<std::atomic<int64_t>> at_;
};

/// Reads the times that ranks of a node write down for each other: the lower half of the steady clock's microseconds.
/// It is right about those of the last 71 minutes.
class SinceCall {
 public:
  explicit SinceCall(Clock::time_point called, Clock::time_point now = Clock::now())
      : now_(steady_us(now)), passed_(now_ - steady_us(called)) {}

  /// Microseconds from the call to that time, which is not after now.
  int64_t operator()(uint32_t time) const { return passed_ - int64_t{static_cast<uint32_t>(now_) - time}; }

 private:
  int64_t now_;
  int64_t passed_;  ///< since the call
};

}  // namespace ours
