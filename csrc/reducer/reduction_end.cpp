#include "reducer/reduction_end.h"

#include <algorithm>
#include <exception>
#include <optional>

#include "common/interval.h"

namespace ours {

EndStamp stamp_end(c10::ivalue::Future& future, bool on_cpu) {
  if (!on_cpu) return nullptr;
  auto stamp = std::make_shared<std::atomic<int64_t>>(-1);
  // Relaxed, because the thread that reads the stamp has waited for the reduction.
  future.addCallback([stamp](c10::ivalue::Future&) { stamp->store(steady_ns(), std::memory_order_relaxed); });
  return stamp;
}

EndStamp stamp_end(c10d::Work& work, bool on_cpu) {
  if (!on_cpu || dynamic_cast<const Timed*>(&work) != nullptr) return nullptr;
  try {
    return stamp_end(*work.getFuture(), on_cpu);
  } catch (const std::exception&) {
    // Some backends have no futures.
    return nullptr;
  }
}

void note_reduction(BucketTimes& times, const c10d::Work* work, const EndStamp& stamp, int64_t asked, int64_t seen) {
  times.reduction_seen_done = seen;
  times.waited = seen - asked;
  times.reduction_began = times.launched;
  times.reduction_ended = seen;
  times.end_is_exact = false;
  if (const auto* timed = dynamic_cast<const Timed*>(work)) {
    if (const std::optional<Interval> interval = timed->interval()) {
      times.reduction_began = std::clamp(interval->began, times.launched, seen);
      times.reduction_ended = std::clamp(interval->ended, times.reduction_began, seen);
      times.end_is_exact = true;
    }
  } else if (stamp != nullptr) {
    // If the callback has not written yet, it is running right now, and `seen` is the end.
    const int64_t ended = stamp->load(std::memory_order_relaxed);
    if (ended >= 0) times.reduction_ended = std::clamp(ended, times.launched, seen);
    times.end_is_exact = true;
  }
}

}  // namespace ours
