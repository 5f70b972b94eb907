#include "reducer/averaging.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "common/interval.h"
#include "reducer/gradient_copy.h"

namespace ours {
namespace {

/// Returns the sum to which every rank that still had input contributed a one.
int active_ranks(c10d::Work& work) {
  work.wait();
  // On a device, wait() only orders the streams; the future tells when the sum is there.
  const auto future = work.getFuture();
  future->waitAndThrow();
  const c10::IValue value = future->value();
  const at::Tensor sum = value.isTensor() ? value.toTensor() : value.toTensorVector().at(0);
  return static_cast<int>(sum.item<double>());
}

EndStamp stamp_end(c10::ivalue::Future& future, bool on_cpu) {
  if (!on_cpu) return nullptr;
  auto stamp = std::make_shared<std::atomic<int64_t>>(-1);
  // Relaxed, because the thread that reads the stamp has waited for the reduction.
  future.addCallback([stamp](c10::ivalue::Future&) { stamp->store(steady_ns(), std::memory_order_relaxed); });
  return stamp;
}

/// Has the end of `work` stamped. Null if that is not needed, because the Work tells it, or not possible: without
/// `on_cpu` a future completes long before the accelerator has run the reduction.
EndStamp stamp_end(c10d::Work& work, bool on_cpu) {
  if (!on_cpu || dynamic_cast<const Timed*>(&work) != nullptr) return nullptr;
  try {
    return stamp_end(*work.getFuture(), on_cpu);
  } catch (const std::exception&) {
    // Some backends have no futures.
    return nullptr;
  }
}

/// Fills in the times of a reduction that was found done at `seen`. `work` may be null.
void note_reduction(BucketTimes& times, const c10d::Work* work, const EndStamp& stamp, int64_t seen) {
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

}  // namespace

Averaging::Averaging(GroupPtr group, c10::Device device) : device_(device) { set_group(std::move(group)); }

void Averaging::set_group(GroupPtr group) {
  TORCH_CHECK(group, "A reducer needs a process group.");
  group_ = std::move(group);
  abilities_ = abilities_of(*group_, device_);
}

void Averaging::set_forward_work(WorkPtr work, bool use_static_world_size) {
  forward_work_ = std::move(work);
  use_static_world_size_ = use_static_world_size;
}

void Averaging::decide() {
  // Ranks that have run out of input must call the same operation, and know only what was agreed beforehand.
  const bool whole_group = !forward_work_ || use_static_world_size_;
  divisor_ = whole_group ? group_->getSize() : active_ranks(*forward_work_);
  in_reduction_ = abilities_.average && whole_group && !weights_.in_use();
  const bool divides_before = !hook_ && (!weights_.in_use() || sums_may_overflow_);
  scale_ = divides_before && !in_reduction_ ? 1.0 / divisor_ : 1.0;
  sparse_divisor_ = divides_before ? divisor_ : 1;
  weights_.start_alone(*group_, device_);
}

void Averaging::start(Bucket& bucket, size_t index, size_t count) {
  bucket.times.launched = steady_ns();
  const bool on_cpu = device_.is_cpu();
  if (hook_) {
    if (!prepare_for_hook(bucket)) return;
    c10d::GradBucket grad_bucket = bucket.grad_bucket(index, count, bucket.buffer_to_reduce());
    bucket.future = hook_->runHook(grad_bucket);
    bucket.end_stamp = stamp_end(*bucket.future, on_cpu);
  } else {
    const bool average = in_reduction_ && !bucket.sparse();
    if (bucket.has_tail()) weights_.write(bucket, group_->getSize());
    bucket.work =
        start_all_reduce(*group_, bucket.pieces_to_reduce(), average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
    if (bucket.work) bucket.end_stamp = stamp_end(*bucket.work, on_cpu);
  }
}

bool Averaging::prepare_for_hook(Bucket& bucket) {
  if (!weights_.in_use()) return true;
  try {
    weights_.finish_alone(group_->getSize());
  } catch (const std::exception&) {
    // finish_weights() throws it again at the end of backward, when the reducer can start anew.
    return false;
  }
  if (weights_.is_set()) scale_in_place(bucket.buffer(), group_->getSize() * weights_.factor(divisor_));
  return true;
}

void Averaging::choose_carrier(BucketList& buckets, bool may_ride) {
  weights_.choose_carrier(buckets, group_->getSize(), may_ride && !hook_);
  sums_may_overflow_ = std::any_of(buckets.begin(), buckets.end(), [](const Bucket& bucket) {
    return c10::toRealValueType(bucket.dtype()) == at::kHalf;
  });
}

double Averaging::result_scale() const {
  if (hook_ || !weights_.in_use()) return 1.0;
  return weights_.factor(divisor_) * (sums_may_overflow_ ? divisor_ : 1);
}

Bucket* Averaging::finish_weights(BucketList& buckets) {
  weights_.finish_alone(group_->getSize());
  return weights_.carrier(buckets);
}

bool Averaging::finish(Bucket& bucket) {
  if (!bucket.work && !bucket.future) return false;
  at::Tensor reduced;
  if (bucket.future) {
    bucket.future->waitAndThrow();
    reduced = hook_->parseHookResult(bucket.future->value());
  } else {
    weights_.await(*bucket.work);
  }
  note_reduction(bucket.times, bucket.work.get(), bucket.end_stamp, steady_ns());
  bucket.work.reset();
  bucket.future.reset();
  if (bucket.has_tail()) weights_.read(bucket, group_->getSize());
  if (reduced.defined()) bucket.set_result(reduced);
  return true;
}

Averaging::FuturePtr Averaging::run_joined(c10d::GradBucket& bucket) {
  if (hook_) return hook_->runHook(bucket);
  const at::Tensor& tensor = bucket.getBuffer();
  const bool average = abilities_.average && use_static_world_size_ && !weights_.in_use() && !tensor.is_sparse();
  return start_all_reduce(*group_, {tensor}, average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM)->getFuture();
}

}  // namespace ours
