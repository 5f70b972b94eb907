#include "reducer/step_record.h"

#include <utility>

#include "common/interval.h"

namespace ours {

using Event = StepTimer::Event;

void StepRecord::begin_forward() {
  ++iterations_;
  forward_counted_ = true;
  timer_.record(iterations_, Event::kForwardStart);
}

void StepRecord::begin_backward() {
  if (!std::exchange(forward_counted_, false)) {
    ++iterations_;
    timer_.forget(Event::kForwardStart);
  }
  began_ns_ = steady_ns();
  compute_ended_ns_ = -1;
  timer_.restart(iterations_);
  timer_.record(iterations_, Event::kBackwardComputeStart);
  ready_order_.clear();
  buckets_reduced_ = 0;
  reduced_in_place_ = 0;
}

void StepRecord::note_compute_ended() {
  timer_.record(iterations_, Event::kBackwardComputeEnd);
  if (compute_ended_ns_ < 0) compute_ended_ns_ = steady_ns();
}

void StepRecord::note_launch() {
  timer_.record_first(iterations_, Event::kBackwardCommStart);
  ++buckets_reduced_;
}

void StepRecord::end_backward(std::shared_ptr<const BucketLayout> layout, std::vector<BucketTimes> buckets) {
  timer_.record(iterations_, Event::kBackwardCommEnd);
  last_backward_ = {iterations_, began_ns_, compute_ended_ns_, steady_ns(), std::move(layout), std::move(buckets)};
}

}  // namespace ours
