#include <utility>

#include "common/interval.h"
#include "reducer/reducer.h"

// What Reducer remembers of the last backward, and tells about it.

namespace ours {

void Reducer::note_layout() {
  auto layout = std::make_shared<BucketLayout>();
  for (const Bucket& bucket : buckets_) {
    layout->bytes.push_back(bucket.bytes());
    layout->parameters.emplace_back();
    for (const GradientSlot& slot : bucket.slots()) layout->parameters.back().push_back(slot.parameter_index);
  }
  layout_ = std::move(layout);
}

void Reducer::note_backward_times() {
  count_backward_for_tuning();
  last_backward_.iteration = iterations_;
  last_backward_.began = backward_began_ns_;
  last_backward_.compute_ended = compute_ended_ns_;
  last_backward_.ended = steady_ns();
  last_backward_.layout = layout_;
  last_backward_.buckets.clear();
  for (const Bucket& bucket : buckets_) last_backward_.buckets.push_back(bucket.times);
}

BackwardTimes Reducer::backward_times() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return last_backward_;
}

std::vector<int64_t> Reducer::backward_stats() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return arrival_ns_;
}

std::vector<BucketTimes> Reducer::bucket_times() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<BucketTimes> times;
  for (const Bucket& bucket : buckets_) times.push_back(bucket.times);
  return times;
}

}  // namespace ours
