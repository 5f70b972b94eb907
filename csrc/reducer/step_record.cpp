#include "reducer/step_record.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "common/interval.h"

namespace ours {

StepRecord::StepRecord(size_t parameter_count, c10::Device device) : arrival_ns_(parameter_count, 0) {
  auto* registry = c10d::TimerRegistry();
  if (registry->Has(device.type())) timer_ = registry->Create(device.type(), device);
}

void StepRecord::begin_forward() {
  ++iterations_;
  forward_counted_ = true;
  forward_began_ = steady_ns();
  stamp(Event::kForwardStart);
}

void StepRecord::begin_backward() {
  if (!std::exchange(forward_counted_, false)) {
    ++iterations_;
    forget(Event::kForwardStart);
  }
  under_way_ = {};
  under_way_.iteration = iterations_;
  under_way_.forward_began = std::exchange(forward_began_, -1);
  under_way_.began = steady_ns();
  forget(Event::kBackwardCommStart);
  stamp(Event::kBackwardComputeStart);
  ready_order_.clear();
  buckets_reduced_ = 0;
  reduced_in_place_ = 0;
}

void StepRecord::note_compute_ended() {
  stamp(Event::kBackwardComputeEnd);
  if (under_way_.compute_ended < 0) under_way_.compute_ended = steady_ns();
}

void StepRecord::note_launch() {
  if (buckets_reduced_++ == 0) stamp(Event::kBackwardCommStart);
}

void StepRecord::end_backward(std::shared_ptr<const BucketLayout> layout, std::vector<BucketTimes> buckets) {
  stamp(Event::kBackwardCommEnd);
  under_way_.ended = steady_ns();
  under_way_.layout = std::move(layout);
  under_way_.buckets = std::move(buckets);
  last_backward_ = std::exchange(under_way_, {});
}

std::map<std::string, int64_t> StepRecord::phase_times() {
  std::map<std::string, int64_t> times;
  if (!timer_) return times;
  const auto add = [&](const std::string& name, std::optional<int64_t> time) {
    // The clocks of different threads may differ a little.
    if (time) times[name] = std::max<int64_t>(*time, 0);
  };
  const auto add_phase = [&](const std::string& name, Event start, Event end) {
    add(name, timer_->measureDifference(start, end));
  };
  add_phase("forward_compute_time", Event::kForwardStart, Event::kBackwardComputeStart);
  add_phase("backward_compute_time", Event::kBackwardComputeStart, Event::kBackwardComputeEnd);
  add_phase("backward_comm_time", Event::kBackwardCommStart, Event::kBackwardCommEnd);
  add_phase("backward_compute_comm_overlap_time", Event::kBackwardCommStart, Event::kBackwardComputeEnd);
  add("forward_compute_time_start", timer_->getTimestamp(Event::kForwardStart));
  add("backward_compute_time_start", timer_->getTimestamp(Event::kBackwardComputeStart));
  add("backward_compute_time_end", timer_->getTimestamp(Event::kBackwardComputeEnd));
  add("backward_comm_time_start", timer_->getTimestamp(Event::kBackwardCommStart));
  add("backward_comm_time_end", timer_->getTimestamp(Event::kBackwardCommEnd));
  return times;
}

}  // namespace ours
