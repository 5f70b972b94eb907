#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "reducer/overlap.h"
#include "reducer/step_timer.h"

namespace ours {

/// The record of the steps so far: their number, and the times and counts of the last one. The logging data and the
/// reports are made from it.
class StepRecord {
 public:
  StepRecord(size_t parameter_count, c10::Device device) : timer_(device), arrival_ns_(parameter_count, 0) {}

  void begin_forward();
  /// Starts the record of a backward. Counts a step too, unless its forward did.
  void begin_backward();
  /// Notes that the gradient of a parameter arrived at `now`, by the steady clock.
  void note_arrival(size_t index, int64_t now) {
    ready_order_.push_back(index);
    arrival_ns_[index] = now - began_ns_;
  }
  void note_compute_ended();
  void note_launch();
  void note_reduced_in_place() { ++reduced_in_place_; }
  /// `buckets` are parallel to `layout`.
  void end_backward(std::shared_ptr<const BucketLayout> layout, std::vector<BucketTimes> buckets);

  int64_t iterations() const { return iterations_; }
  StepTimer& timer() { return timer_; }
  /// The parameters, in the order in which their gradients arrived in the last backward.
  const std::vector<size_t>& ready_order() const { return ready_order_; }
  void set_ready_order(std::vector<size_t> order) { ready_order_ = std::move(order); }
  /// For each parameter, nanoseconds from the beginning of the last backward to its gradient.
  const std::vector<int64_t>& arrival_ns() const { return arrival_ns_; }
  int64_t buckets_reduced() const { return buckets_reduced_; }
  /// How many gradients the last backward reduced where they lay.
  int64_t reduced_in_place() const { return reduced_in_place_; }
  /// The last backward that ended in a reduction.
  const BackwardTimes& last_backward() const { return last_backward_; }

 private:
  StepTimer timer_;
  int64_t iterations_ = 0;
  bool forward_counted_ = false;  ///< the backward to come is that of a forward that has been counted
  int64_t began_ns_ = 0;
  int64_t compute_ended_ns_ = -1;
  std::vector<size_t> ready_order_;
  std::vector<int64_t> arrival_ns_;
  int64_t buckets_reduced_ = 0;
  int64_t reduced_in_place_ = 0;
  BackwardTimes last_backward_;
};

}  // namespace ours
