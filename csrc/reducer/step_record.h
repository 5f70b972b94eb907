#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <vector>

#include "reducer/overlap.h"

namespace ours {

/// The record of the steps so far: their number, and the times and counts of the last one. The logging data and the
/// reports are made from it.
///
/// The phases of sampled steps are also timed by c10d's timers, which use events on an accelerator. The first ten steps
/// are sampled, then every hundredth or what set_sample_rate() says.
class StepRecord {
 public:
  StepRecord(size_t parameter_count, c10::Device device);

  void set_sample_rate(int64_t rate) { sample_rate_ = rate; }

  void begin_forward();
  /// Starts the record of a backward. Counts a step too, unless its forward did.
  void begin_backward();
  /// Notes that the gradient of a parameter arrived at `now`, by the steady clock.
  void note_arrival(size_t index, int64_t now) {
    ready_order_.push_back(index);
    arrival_ns_[index] = now - under_way_.began;
  }
  void note_compute_ended();
  void note_launch();
  void note_reduced_in_place() { ++reduced_in_place_; }
  /// `buckets` are parallel to `layout`.
  void end_backward(std::shared_ptr<const BucketLayout> layout, std::vector<BucketTimes> buckets);

  int64_t iterations() const { return iterations_; }
  /// The parameters, in the order in which their gradients arrived in the last backward.
  const std::vector<size_t>& ready_order() const { return ready_order_; }
  void set_ready_order(std::vector<size_t> order) { ready_order_ = std::move(order); }
  /// For each parameter, nanoseconds from the beginning of the last backward to its gradient.
  const std::vector<int64_t>& arrival_ns() const { return arrival_ns_; }
  int64_t buckets_reduced() const { return buckets_reduced_; }
  /// How many gradients the last backward reduced in place, without copying them into a bucket.
  int64_t reduced_in_place() const { return reduced_in_place_; }
  /// The last backward that ended in a reduction.
  const BackwardTimes& last_backward() const { return last_backward_; }
  /// Whether the current step is sampled.
  bool is_sampled() const {
    return timer_ && iterations_ > 0 && (iterations_ <= 10 || iterations_ % sample_rate_ == 0);
  }
  /// The durations of the phases of the last sampled step, and when they began and ended, in nanoseconds, by the names
  /// that torch's logging data uses. Phases that were not recorded are left out.
  std::map<std::string, int64_t> phase_times();

 private:
  using Event = c10d::Timer::Event;

  void stamp(Event event) {
    if (is_sampled()) timer_->record(event);
  }
  /// Clears the timestamp of `event`.
  void forget(Event event) {
    if (timer_) timer_->getTimeRef(event) = c10d::kUnsetTime;
  }

  std::unique_ptr<c10d::Timer> timer_;  ///< null if c10d has none for the device
  int64_t sample_rate_ = 100;
  int64_t iterations_ = 0;
  int64_t forward_began_ = -1;
  bool forward_counted_ = false;  ///< the next backward belongs to a forward that has already counted the step
  std::vector<size_t> ready_order_;
  std::vector<int64_t> arrival_ns_;
  int64_t buckets_reduced_ = 0;
  int64_t reduced_in_place_ = 0;
  BackwardTimes under_way_;
  BackwardTimes last_backward_;
};

}  // namespace ours
