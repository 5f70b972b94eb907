#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "common/interval.h"
#include "reducer/gradient_copy.h"
#include "reducer/reducer.h"

// Averages back: how Reducer ends a backward.

namespace ours {
namespace {

using Event = StepTimer::Event;

}  // namespace

void Reducer::on_all_launched() {
  all_launched_ = true;
  if (!static_graph_ && options_.find_unused_parameters) used_.start_reduction(*group_);
  if (!manual_finalization_) queue_finalization();
}

void Reducer::queue_finalization() {
  // Runs once autograd has computed everything, on a thread that holds no Python lock. The current streams are then
  // those of whoever called backward, which autograd has made wait for the gradients: what comes after backward must
  // wait for the averages, and not what comes after the last gradient in the stream of its accumulator.
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
    const std::lock_guard<std::recursive_mutex> lock(self->mutex_);
    self->timer_.record(self->iterations_, Event::kBackwardComputeEnd);
    self->finalize();
  });
}

void Reducer::delay_all_reduce() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  // Without a reduction to come there is nothing to record, and the next backward tries again.
  if (!expects_gradients_ || static_recorded_) return;
  timer_.record(iterations_, Event::kBackwardComputeEnd);
  compute_ended_ns_ = steady_ns();
  used_.start_reduction(*group_);
  unused_.clear();
  unfinished_ = true;
  whole_buckets_ = !may_reduce_in_place();
  static_recorded_ = true;
  settle_division();
  rebuild_order_.clear();
  // The last arrival of a parameter is what completes it.
  std::vector<size_t> order;
  for (auto it = ready_order_.rbegin(); it != ready_order_.rend(); ++it) {
    if (!arrived_[*it]) order.push_back(*it);
    arrived_[*it] = true;
  }
  std::reverse(order.begin(), order.end());
  for (size_t index = 0; index < parameters_.size(); ++index) {
    store_gradient(index, {});
    if (arrivals_expected_[index] == 0) unused_.push_back(index);
    arrived_[index] = true;
  }
  ready_order_ = order;
  rebuild_order_ = unused_;
  rebuild_order_.insert(rebuild_order_.end(), order.begin(), order.end());
  for (size_t index = 0; index < buckets_.size(); ++index) launch(index);
  next_bucket_ = buckets_.size();
  all_launched_ = true;
  if (!manual_finalization_) finalize();
}

void Reducer::finalize_manually() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(manual_finalization_,
              "finalize_backward() needs require_manual_backward_finalization = True, set before forward.");
  TORCH_CHECK(unfinished_ || expects_gradients_,
              "There is no gradient reduction to finalize: call finalize_backward() once after each backward that "
              "synchronises gradients.");
  TORCH_CHECK(all_launched_, "finalize_backward() was called before all gradient buckets were ready.");
  timer_.record(iterations_, Event::kBackwardComputeEnd);
  finalize();
}

void Reducer::finalize() {
  // First, so that an error below leaves a reducer that can start anew.
  expects_gradients_ = false;
  unfinished_ = false;
  all_launched_ = false;
  close_memory();
  if (compute_ended_ns_ < 0) compute_ended_ns_ = steady_ns();
  const std::vector<FuturePtr> installed = std::exchange(installed_futures_, {});
  const c10::intrusive_ptr<c10d::Work> forward_work = std::move(forward_work_);
  // All are awaited even if one fails: what still ran would write into the buckets of the next backward.
  std::exception_ptr first_error;
  const auto attempt = [&](const auto& step) {
    try {
      step();
    } catch (...) {
      if (!first_error) first_error = std::current_exception();
    }
  };
  finished_in_.clear();
  if (before_hand_over_) attempt(before_hand_over_);
  for (Bucket& bucket : buckets_) attempt([&] { finish_bucket(bucket); });
  for (const FuturePtr& future : installed) attempt([&] { future->waitAndThrow(); });
  attempt([&] { used_.finish(/*keep=*/static_graph_); });
  gradients_.forget_context();
  if (first_error) {
    // A peer that has not noticed yet may still write there.
    drop_memory();
    std::rethrow_exception(first_error);
  }
  timer_.record(iterations_, Event::kBackwardCommEnd);
  note_backward_times();
  if (options_.lazy_bucket_allocation) {
    for (Bucket& bucket : buckets_) bucket.release();
  }
}

void Reducer::finish_bucket(Bucket& bucket) {
  if (!bucket.work && !bucket.future) return;
  const int64_t asked = steady_ns();
  at::Tensor reduced;
  if (bucket.future) {
    bucket.future->waitAndThrow();
    reduced = hook_->parseHookResult(bucket.future->value());
  } else {
    bucket.work->wait();
  }
  note_reduction(bucket.times, bucket.work.get(), bucket.end_stamp, asked, steady_ns());
  bucket.work.reset();
  bucket.future.reset();
  if (bucket.sparse()) {
    if (reduced.defined() && !reduced.is_same(bucket.buffer())) bucket.buffer().copy_(reduced);
    GradientSlot& slot = bucket.slots().front();
    gradients_.visit(slot.parameter, [&](at::Tensor& gradient) {
      // Only another rank had a gradient.
      if (gradient.defined() || bucket.buffer()._nnz() == 0) return false;
      gradient = bucket.buffer();
      return true;
    });
    return;
  }
  if (reduced.defined()) bucket.set_result(reduced);
  finish_dense(bucket);
}

void Reducer::finish_dense(Bucket& bucket) {
  finished_in_.note(bucket.device());
  if (optimizer_in_backward_) return;
  std::vector<PlacedTensor> fused;
  for (GradientSlot& slot : bucket.slots()) {
    // A parameter that no rank used keeps its gradient, or the lack of one.
    if (may_be_unused() && !used_.used_anywhere(slot.parameter_index)) continue;
    hand_over(bucket, slot, fused);
  }
  if (bucket.copier != nullptr) unflatten(*bucket.copier, bucket.result(), fused, 1.0);
  keep_for_current_stream(bucket.buffer());
}

void Reducer::hand_over(Bucket& bucket, GradientSlot& slot, std::vector<PlacedTensor>& fused) {
  const at::Tensor in_place = std::exchange(slot.in_place, {});
  gradients_.visit(slot.parameter, [&](at::Tensor& gradient) {
    if (in_place.defined()) {
      if (gradient.defined() && gradient.is_alias_of(in_place)) {
        if (gradient._version() != slot.in_place_version) {
          fail(c10::str(
              "The gradient of parameter ", slot.parameter_index, " (", name_of(slot.parameter_index),
              ") was changed during backward, while it was being averaged. Change gradients after backward, or "
              "set OURS_REDUCE_IN_PLACE=0."));
        }
        // Reduced below autograd's sight: a backward that saved it must be able to see the change.
        gradient.unsafeGetTensorImpl()->bump_version();
        return false;
      }
      // Somebody has replaced it since.
      if (!gradient.defined()) gradient = at::empty_strided(slot.parameter.sizes(), slot.strides, in_place.options());
      copy_scaled(gradient, slot.shaped(in_place), 1.0);
      return true;
    }
    // In mixed precision the bucket cannot be viewed: the gradient is of the parameter's precision, the bucket lower.
    if (!options_.gradient_as_bucket_view || mixed_precision_dtype_) {
      if (!gradient.defined()) {
        const auto options = slot.result.options().dtype(slot.parameter.scalar_type());
        gradient = at::empty_strided(slot.view.sizes(), slot.view.strides(), options);
      }
      copy_back(bucket, slot, gradient, fused);
      return true;
    }
    if (!slot.result.is_alias_of(slot.view)) copy_back(bucket, slot, slot.view, fused);
    if (!gradient.defined() || slot.kept) {
      gradient = slot.gradient_view();
      return true;
    }
    if (gradient.is_alias_of(bucket.buffer())) return false;
    fail(
        c10::str("Detected at least one parameter gradient is not the expected DDP bucket view with "
                 "gradient_as_bucket_view=True: parameter ",
                 slot.parameter_index, " (", name_of(slot.parameter_index),
                 "). A hook has replaced the gradient during backward; construct the module with "
                 "gradient_as_bucket_view=False, or change the gradient in place."));
  });
}

}  // namespace ours
