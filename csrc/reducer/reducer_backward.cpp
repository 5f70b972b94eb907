#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "common/interval.h"
#include "reducer/comm_hooks.h"
#include "reducer/gradient_copy.h"
#include "reducer/gradient_ownership.h"
#include "reducer/reducer.h"
#include "reducer/reducer_errors.h"

// Gradients in, reductions out: what Reducer does while backward runs. What it does at its end: reducer_finalize.cpp.

namespace ours {
namespace {

using Event = StepTimer::Event;

/// The sum that every rank contributed a one to, if it still had input.
int active_ranks(c10d::Work& work) {
  work.wait();
  // On a device that has only told the stream to wait.
  const auto future = work.getFuture();
  future->waitAndThrow();
  const c10::IValue value = future->value();
  const at::Tensor sum = value.isTensor() ? value.toTensor() : value.toTensorVector().at(0);
  return static_cast<int>(sum.item<double>());
}

}  // namespace

void Reducer::prepare_for_forward() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  ++iterations_;
  forward_prepared_ = true;
  timer_.record(iterations_, Event::kForwardStart);
}

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!std::exchange(forward_prepared_, false)) {
    ++iterations_;
    timer_.forget(Event::kForwardStart);
  }
  backward_began_ns_ = steady_ns();
  compute_ended_ns_ = -1;
  // Left over where tuning waits for further backwards.
  if (tuning_.backwards_left > 0) rebuild_order_.clear();
  timer_.restart(iterations_);
  timer_.record(iterations_, Event::kBackwardComputeStart);
  require_idle();
  expects_gradients_ = true;
  all_launched_ = false;
  next_bucket_ = 0;
  divisor_ = 0;
  for (Bucket& bucket : buckets_) bucket.reset();
  std::fill(arrived_.begin(), arrived_.end(), false);
  ready_order_.clear();
  buckets_reduced_ = 0;
  reduced_in_place_ = 0;
  open_memory();
  if (static_graph_) {
    // Counted anew: an earlier backward may have failed before all of it was seen.
    if (!static_recorded_) std::fill(arrivals_expected_.begin(), arrivals_expected_.end(), 0);
    arrivals_left_ = arrivals_expected_;
    return;
  }
  unused_.clear();
  if (!options_.find_unused_parameters) return;
  RECORD_FUNCTION("torch.distributed.ddp.reducer::search_unused_parameters", std::vector<c10::IValue>());
  unused_ = find_unreached(accumulators(), outputs);
  if (unused_.empty()) {
    TORCH_WARN_ONCE(
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the "
        "forward pass. The search through the graph costs time in every iteration: leave the flag off if all "
        "parameters are always used.");
  }
  if (!first_unused_) first_unused_ = unused_;
  if (*first_unused_ != unused_) graph_is_static_ = false;
}

bool Reducer::records_usage() const { return static_graph_ ? !static_recorded_ : options_.find_unused_parameters; }

void Reducer::on_gradient(size_t index, const at::Tensor& incoming) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  gradients_.adopt_thread_context();
  if (records_usage()) {
    // Outputs that the loss does not use give undefined gradients, and those do not count. Steps without a reduction
    // do, because their gradients are part of the next one.
    gradients_.visit(parameters_[index], [&](at::Tensor& gradient) {
      if (gradient.defined()) used_.mark_used(index);
      return false;
    });
  }
  if (!expects_gradients_) return;
  if (static_graph_ && !static_recorded_) {
    ++arrivals_expected_[index];
    ready_order_.push_back(index);
    const int64_t now = steady_ns();
    arrival_ns_[index] = now - backward_began_ns_;
    buckets_[locations_[index].bucket].note_arrival(now);
    return;
  }
  if (!unfinished_) begin_reducing();
  if (counts_as_arrived(index)) mark_ready(index, incoming);
}

void Reducer::begin_reducing() {
  unfinished_ = true;
  const bool allowed = may_reduce_in_place();
  was_seen_ = allowed && !is_unseen();
  whole_buckets_ = !allowed || was_seen_;
  if (whole_buckets_) drop_memory();
  for (const size_t unused : unused_) mark_ready(unused, {});
}

std::vector<NodePtr> Reducer::accumulators() const {
  if (!mixed_precision_dtype_) return hooks_.accumulators();
  // Parameters have others while they have another precision.
  std::vector<NodePtr> current;
  for (const at::Tensor& parameter : parameters_) {
    current.push_back(torch::autograd::impl::grad_accumulator(parameter));
  }
  return current;
}

bool Reducer::is_unseen() const {
  std::vector<const torch::autograd::Node*> awaited;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (std::binary_search(unused_.begin(), unused_.end(), index)) continue;
    // It gets the rest of its gradient from another backward, and what runs there is not known yet.
    if (static_graph_ && arrivals_left_[index] > 1) return false;
    awaited.push_back(hooks_.accumulators()[index].get());
  }
  return backward_runs_unseen(awaited, options_.is_library_code);
}

bool Reducer::counts_as_arrived(size_t index) {
  if (!static_graph_) return true;
  // A parameter used several times gets as many calls as in the first iteration, and is complete with the last.
  if (arrivals_left_[index] == 0) fail(describe_changed_graph(index, name_of(index)));
  return --arrivals_left_[index] == 0;
}

void Reducer::settle_division() {
  if (divisor_ != 0) return;
  divisor_ = group_->getSize();
  if (forward_work_ && !forward_static_world_size_) divisor_ = active_ranks(*forward_work_);
  // Ranks that have joined must call the same operation, and know only what was agreed beforehand.
  const bool whole_group = !forward_work_ || forward_static_world_size_;
  average_in_reduction_ = backend_.average && whole_group;
  scale_ = hook_ || average_in_reduction_ ? 1.0 : 1.0 / divisor_;
}

void Reducer::mark_ready(size_t index, const at::Tensor& incoming) {
  if (arrived_[index]) fail(describe_marked_twice(index, name_of(index), static_graph_));
  arrived_[index] = true;
  ready_order_.push_back(index);
  if (rebuilds_buckets()) rebuild_order_.push_back(index);
  const int64_t now = steady_ns();
  arrival_ns_[index] = now - backward_began_ns_;
  settle_division();
  store_gradient(index, incoming);
  if (buckets_[locations_[index].bucket].mark_arrived(now)) launch_ready_buckets();
}

void Reducer::store_gradient(size_t index, const at::Tensor& incoming) {
  const Location& location = locations_[index];
  Bucket& bucket = buckets_[location.bucket];
  bucket.streams.note(bucket.device());
  if (bucket.sparse()) {
    store_sparse(bucket, bucket.slots()[location.slot]);
  } else {
    allocate(bucket);
    store_dense(bucket, location.slot, incoming);
  }
}

void Reducer::store_dense(Bucket& bucket, size_t slot_index, const at::Tensor& incoming) {
  GradientSlot& slot = bucket.slots()[slot_index];
  slot.kept = options_.gradient_as_bucket_view && may_be_unused() && !used_.known_used(slot.parameter_index);
  gradients_.visit(slot.parameter, [&](at::Tensor& gradient) {
    if (!gradient.defined()) {
      bucket.place(*group_, slot);
      slot.view.zero_();
      return false;
    }
    if (slot.view.defined() && gradient.is_alias_of(slot.view)) {
      // The bucket is about to change; a gradient that may have to stay moves out of it.
      if (slot.kept) gradient = gradient.detach().clone();
      if (scale_ != 1.0) copy_scaled(slot.view, slot.view, scale_);
      return slot.kept;
    }
    if (at::GradMode::is_enabled() && gradient.requires_grad()) {
      TORCH_WARN_ONCE(
          "backward(create_graph=True): the gradients are averaged over the ranks, but a backward through them runs "
          "through this rank's graph alone, and its results are averaged only if it accumulates into parameters.");
    }
    if (reduces_in_place(slot, gradient, incoming)) {
      ++reduced_in_place_;
      slot.in_place_version = gradient._version();
      slot.in_place = gradient.detach().as_strided({gradient.numel()}, {1});
      return false;
    }
    bucket.place(*group_, slot);
    const std::string misfit = describe_gradient_misfit(gradient, slot.view);
    if (!misfit.empty()) {
      fail(c10::str("The gradient of parameter ", slot.parameter_index, " (", name_of(slot.parameter_index),
                    ") cannot be reduced: ", misfit, "."));
    }
    if (defers_copies(bucket)) {
      bucket.deferred.push_back({slot_index, gradient});
      return false;
    }
    copy_scaled(slot.view, gradient, scale_);
    if (!options_.gradient_as_bucket_view || slot.kept) return false;
    gradient = slot.gradient_view();
    return true;
  });
}

bool Reducer::reduces_in_place(const GradientSlot& slot, const at::Tensor& gradient, const at::Tensor& incoming) const {
  if (whole_buckets_ || !average_in_reduction_ || slot.bytes() < kLeastInPlaceBytes) return false;
  // A parameter that no rank used must keep its gradient.
  if (may_be_unused() && !used_.known_used(slot.parameter_index)) return false;
  if (!slot.fits(gradient)) return false;
  return is_owned_by_parameter(gradient, incoming);
}

void Reducer::store_sparse(Bucket& bucket, GradientSlot& slot) {
  gradients_.visit(slot.parameter, [&](at::Tensor& gradient) {
    if (!gradient.defined()) {
      bucket.set_sparse_gradient(empty_sparse_gradient(slot.parameter));
      return false;
    }
    if (!gradient.is_sparse()) {
      fail(c10::str("Expected variable to have sparse gradient: parameter ", slot.parameter_index, " (",
                    name_of(slot.parameter_index), ") got a dense one. Construct its module with sparse=False."));
    }
    // The sum of sparse gradients is not divided by the backend: what it adds up has to be in proportion already.
    if (!hook_) gradient.div_(divisor_);
    bucket.set_sparse_gradient(gradient);
    return false;
  });
}

bool Reducer::skips(const Bucket& bucket) const {
  if (!options_.skip_all_reduce_unused_params) return false;
  const auto& slots = bucket.slots();
  return std::all_of(slots.begin(), slots.end(), [&](const GradientSlot& slot) {
    return std::binary_search(unused_.begin(), unused_.end(), slot.parameter_index);
  });
}

void Reducer::launch_ready_buckets() {
  // In bucket order, whatever order they fill up in: collectives must be called in the same order on every rank.
  while (next_bucket_ < buckets_.size() && buckets_[next_bucket_].ready()) launch(next_bucket_++);
  if (next_bucket_ == buckets_.size()) on_all_launched();
}

void Reducer::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  order_streams(bucket);
  copy_deferred(bucket);
  if (skips(bucket)) return;
  timer_.record_first(iterations_, Event::kBackwardCommStart);
  bucket.times.launched = steady_ns();
  const bool on_cpu = parameters_.front().is_cpu();
  ++buckets_reduced_;
  if (hook_) {
    c10d::GradBucket grad_bucket = bucket.grad_bucket(index, buckets_.size(), bucket.buffer_to_reduce());
    bucket.future = hook_->runHook(grad_bucket);
    bucket.end_stamp = stamp_end(*bucket.future, on_cpu);
  } else {
    const bool average = average_in_reduction_ && !bucket.sparse();
    bucket.work = start_all_reduce(
        *group_, bucket.sparse() ? std::vector<at::Tensor>{bucket.buffer()} : bucket.pieces_to_reduce(),
        average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM);
    if (bucket.work) bucket.end_stamp = stamp_end(*bucket.work, on_cpu);
  }
}

Reducer::FuturePtr Reducer::run_hook(c10d::GradBucket& bucket) {
  if (hook_) return hook_->runHook(bucket);
  const at::Tensor& tensor = bucket.getBuffer();
  const bool average = backend_.average && joined_static_world_size_ && !tensor.is_sparse();
  return start_all_reduce(*group_, {tensor}, average ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM)->getFuture();
}

Reducer::FuturePtr Reducer::run_all_reduce(c10d::GradBucket& bucket) {
  return start_all_reduce(*group_, {bucket.getBuffer()}, c10d::ReduceOp::SUM)->getFuture();
}

}  // namespace ours
