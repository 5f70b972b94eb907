#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

namespace ours {

/// Times the phases of sampled steps with c10d's timers, which use events on an accelerator.
///
/// The first ten steps are sampled, then every `sample_rate`-th.
class StepTimer {
 public:
  using Event = c10d::Timer::Event;

  explicit StepTimer(c10::Device device) {
    auto* registry = c10d::TimerRegistry();
    if (registry->Has(device.type())) timer_ = registry->Create(device.type(), device);
  }

  void set_sample_rate(int64_t rate) { sample_rate_ = rate; }
  bool samples(int64_t step) const { return timer_ && step > 0 && (step <= 10 || step % sample_rate_ == 0); }

  void record(int64_t step, Event event) {
    if (samples(step)) timer_->record(event);
  }
  /// Records only the first `event` since restart() was called.
  void record_first(int64_t step, Event event) {
    if (samples(step) && timer_->getTimeRef(event) < 0) timer_->record(event);
  }
  void restart(int64_t step) {
    if (samples(step)) timer_->getTimeRef(Event::kBackwardCommStart) = c10d::kUnsetTime;
  }
  /// Makes `event` one that was never recorded.
  void forget(Event event) {
    if (timer_) timer_->getTimeRef(event) = c10d::kUnsetTime;
  }
  /// Nanoseconds from one event to another, if both were recorded.
  std::optional<int64_t> between(Event start, Event end) {
    return timer_ ? timer_->measureDifference(start, end) : std::nullopt;
  }
  std::optional<int64_t> timestamp(Event event) { return timer_ ? timer_->getTimestamp(event) : std::nullopt; }

 private:
  std::unique_ptr<c10d::Timer> timer_;
  int64_t sample_rate_ = kDefaultSampleRate;
  static constexpr int64_t kDefaultSampleRate = 100;
};

}  // namespace ours
