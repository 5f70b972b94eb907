#include "reducer/reducer.h"

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "common/interval.h"
#include "common/options.h"
#include "reducer/program_code.h"

namespace ours {

// --- set-up ---

std::shared_ptr<Reducer> Reducer::create(std::vector<at::Tensor> parameters, GroupPtr group, ReducerOptions options) {
  TORCH_CHECK(group, "A reducer needs a process group.");
  TORCH_CHECK(!parameters.empty(), "A reducer needs at least one parameter that requires a gradient.");
  const size_t sparse = options.expect_sparse_gradients.size();
  TORCH_CHECK(sparse == 0 || sparse == parameters.size(), "expect_sparse_gradients has ", sparse, " entries for ",
              parameters.size(), " parameters.");
  const std::shared_ptr<Reducer> reducer(new Reducer(std::move(parameters), std::move(group), std::move(options)));
  reducer->attach();
  return reducer;
}

Reducer::Reducer(std::vector<at::Tensor> parameters, GroupPtr group, ReducerOptions options)
    : parameters_(std::move(parameters)),
      options_(std::move(options)),
      errors_(options_),
      record_(parameters_.size(), parameters_.front().device()),
      averaging_(std::move(group), parameters_.front().device()),
      used_(parameters_.size(), parameters_.front().device(), options_.find_unused_parameters),
      static_graph_(parameters_.size()),
      passes_(parameters_.size()),
      in_place_(parameters_, options_),
      transfer_(options_, averaging_, used_, errors_),
      bad_gradients_(parameters_, options_, errors_),
      plan_(parameters_, options_, *averaging_.group()),
      buckets_(parameters_, options_),
      arrived_(parameters_.size(), false) {
  make_buckets(plan_.first_buckets());
}

void Reducer::attach() {
  AutogradHooks::Callback callback;
  // The hooks live no longer than this object, which owns them.
  if (options_.attach_to_autograd)
    callback = [this](size_t index, const at::Tensor& incoming) { on_gradient(index, incoming); };
  hooks_.attach(parameters_, std::move(callback));
}

void Reducer::make_buckets(const Buckets& indices) {
  buckets_.assign(indices, mixed_precision_dtype_);
  averaging_.choose_carrier(buckets_, /*may_ride=*/!options_.skip_all_reduce_unused_params);
  next_bucket_ = 0;
  if (!options_.gradient_as_bucket_view) return;
  for (Bucket& bucket : buckets_) {
    if (!options_.lazy_bucket_allocation) bucket.allocate(*group(), /*whole=*/true);
    transfer_.move_into(bucket);
  }
}

bool Reducer::rebuild_buckets() {
  const Lock lock(mutex_);
  require_idle();
  if (!plan_.is_due()) return false;
  if (plan_.arrived() != parameters_.size()) {
    errors_.raise("Buckets cannot be rebuilt: ", plan_.arrived(), " gradients arrived in the first iteration, ",
                  parameters_.size(), " were expected.");
  }
  const bool seen = record_.last_backward().iteration > 0;
  make_buckets(plan_.rebuild(*group(), seen ? record_.arrival_ns() : std::vector<int64_t>()));
  return true;
}

void Reducer::require_idle() {
  if (unfinished_) errors_.unfinished_reduction(arrived_, group()->getRank(), static_graph_.enabled());
}

void Reducer::register_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const Lock lock(mutex_);
  TORCH_CHECK(!averaging_.has_hook(),
              "register_comm_hook or register_builtin_comm_hook can only be called once: a communication hook is "
              "registered already.");
  TORCH_CHECK(!unfinished_,
              "A communication hook cannot be registered while gradients are being reduced, because some have already "
              "been reduced without it. Register it before backward begins.");
  averaging_.set_hook(std::move(hook));
  renew_buckets_for_weights();
  hooks_.set_runs_program_code();
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  if (record_.iterations() > 0) {
    errors_.raise("set_static_graph() should be called before training loop starts and after DDP is constructed.");
  }
  static_graph_.enable();
  used_.track();
  plan_.allow_rebuilding();
}

void Reducer::set_manual_finalization(bool required) {
  const Lock lock(mutex_);
  TORCH_CHECK(!expects_gradients_ && !unfinished_,
              "Manual finalization cannot be switched between forward and the end of backward. Set it before forward.");
  manual_finalization_ = required;
}

void Reducer::reset_state() {
  const Lock lock(mutex_);
  expects_gradients_ = false;
  unfinished_ = false;
  next_bucket_ = 0;
  std::fill(arrived_.begin(), arrived_.end(), true);
  installed_futures_.clear();
  plan_.start_anew();
  averaging_.begin_backward();
  averaging_.end_backward();
  bad_gradients_.forget();
  in_place_.drop_memory();
  used_.reset();
  static_graph_.forget_record();
  transfer_.forget_context();
  for (Bucket& bucket : buckets_) {
    transfer_.move_out_of_reduction(bucket);
    bucket.reset();
  }
}

void Reducer::set_process_group(GroupPtr group) {
  const Lock lock(mutex_);
  averaging_.set_group(std::move(group));
  renew_buckets_for_weights();
  in_place_.drop_memory();
  for (Bucket& bucket : buckets_) transfer_.renew_memory(bucket);
}

// --- gradients in, reductions out ---

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  const Lock lock(mutex_);
  plan_.begin_backward();
  record_.begin_backward();
  require_idle();
  expects_gradients_ = true;
  next_bucket_ = 0;
  averaging_.begin_backward();
  for (Bucket& bucket : buckets_) bucket.reset();
  std::fill(arrived_.begin(), arrived_.end(), false);
  passes_.start_anew();
  if (!passes_.enabled()) open_memory();
  static_graph_.begin_backward();
  // Those of a static graph never change.
  if (static_graph_.enabled()) return;
  if (options_.find_unused_parameters) unused_.search(accumulators(), outputs);
}

bool Reducer::may_reduce_in_place() const {
  // With manual finalization the program goes on while gradients are reduced.
  return ours::options().reduce_in_place && averaging_.abilities().pieces && !averaging_.has_hook() &&
         !options_.gradient_as_bucket_view && !mixed_precision_dtype_ && !optimizer_in_backward_ &&
         !manual_finalization_;
}

void Reducer::open_memory() {
  if (!may_reduce_in_place()) return in_place_.drop_memory();
  // After a reduction that failed, peers may still write to the gradients that it left.
  if (!unfinished_) in_place_.open_memory(averaging_);
}

void Reducer::on_gradient(size_t index, const at::Tensor& incoming) {
  const Lock lock(mutex_);
  transfer_.adopt_thread_context();
  // Outputs that the loss does not use give undefined gradients, which do not count. Steps without a reduction do
  // count, because their gradients are part of the next one.
  if (used_.tracked() && !static_graph_.recorded() && transfer_.has_gradient(parameters_[index])) {
    used_.mark_used(index);
  }
  if (!passes_.is_last(index, errors_) || !expects_gradients_) return;
  if (static_graph_.is_recording()) {
    const int64_t now = steady_ns();
    static_graph_.record(index);
    record_.note_arrival(index, now);
    buckets_.bucket_of(index).note_arrival(now);
    return;
  }
  if (!unfinished_) begin_reducing();
  if (completes(index)) mark_ready(index, incoming);
}

void Reducer::begin_reducing() {
  unfinished_ = true;
  const bool allowed = may_reduce_in_place();
  in_place_.decide(allowed, allowed && runs_no_program_code());
  if (passes_.enabled() && in_place_.is_active()) in_place_.open_memory(averaging_);
  for (const size_t unused : unused_.indices()) mark_ready(unused, {});
}

bool Reducer::runs_no_program_code() const {
  std::vector<const torch::autograd::Node*> awaited;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (unused_.contains(index)) continue;
    // The rest of its gradient comes from another backward, and it is not known yet what runs there.
    if (static_graph_.enabled() && static_graph_.outstanding(index) > 1) return false;
    awaited.push_back(hooks_.accumulators()[index].get());
  }
  return backward_runs_no_program_code(awaited, options_.is_library_code);
}

std::vector<NodePtr> Reducer::accumulators() const {
  if (!mixed_precision_dtype_) return hooks_.accumulators();
  // Parameters have other nodes while they have another precision.
  std::vector<NodePtr> current;
  for (const at::Tensor& parameter : parameters_) {
    current.push_back(torch::autograd::impl::grad_accumulator(parameter));
  }
  return current;
}

bool Reducer::completes(size_t index) {
  if (!static_graph_.enabled()) return true;
  if (static_graph_.outstanding(index) == 0) {
    errors_.raise("Your training graph has changed in this iteration: ", errors_.parameter(index),
                  " received more gradients than in the first iteration, e.g., it was unused then. This is not "
                  "compatible with static_graph set to True; construct the module without it.");
  }
  static_graph_.count_down(index);
  return static_graph_.outstanding(index) == 0;
}

void Reducer::mark_ready(size_t index, const at::Tensor& incoming) {
  if (arrived_[index]) errors_.marked_twice(index, static_graph_.enabled());
  arrived_[index] = true;
  const int64_t now = steady_ns();
  plan_.note_arrival(index);
  record_.note_arrival(index, now);
  averaging_.settle();
  store(index, incoming);
  if (buckets_.bucket_of(index).mark_arrived(now)) launch_ready_buckets();
}

void Reducer::store(size_t index, const at::Tensor& incoming) {
  const bool in_place =
      transfer_.store(buckets_.bucket_of(index), buckets_.slot_of(index), incoming, in_place_.is_active());
  if (in_place) record_.note_reduced_in_place();
}

void Reducer::launch_ready_buckets() {
  // In bucket order, whatever order they fill up in: collectives must be called in the same order on every rank.
  // A bucket that could not be launched is not behind us, so that the step cannot be finished without it.
  for (; next_bucket_ < buckets_.size() && buckets_[next_bucket_].ready(); ++next_bucket_) launch(next_bucket_);
  if (next_bucket_ == buckets_.size()) on_all_launched();
}

bool Reducer::skips(const Bucket& bucket) const {
  if (!options_.skip_all_reduce_unused_params) return false;
  const auto& slots = bucket.slots();
  return std::all_of(slots.begin(), slots.end(),
                     [&](const GradientSlot& slot) { return unused_.contains(slot.parameter_index); });
}

void Reducer::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  transfer_.complete(bucket);
  if (skips(bucket)) return;
  bad_gradients_.look_at_gradients(bucket);
  record_.note_launch();
  averaging_.start(bucket, index, buckets_.size());
}

// --- averages back ---

void Reducer::on_all_launched() {
  // For a static graph, the used parameters have been known since it was recorded.
  if (used_.tracked() && !static_graph_.enabled()) used_.start_reduction(*group());
  // Outside of backward, reduce_missing() finishes the step.
  if (!manual_finalization_ && torch::autograd::get_current_graph_task_id() != -1) queue_finalization();
}

void Reducer::queue_finalization() {
  // The callback runs once autograd has computed everything, on a thread that does not hold the GIL. The current
  // streams are then those of the caller of backward, which autograd has made wait for the gradients. So what follows
  // backward waits for the averages, and what follows the last gradient in the stream of its accumulator does not.
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
    const Lock lock(self->mutex_);
    self->record_.note_compute_ended();
    self->finalize();
  });
}

void Reducer::delay_all_reduce() {
  const Lock lock(mutex_);
  // Without a reduction to come there is nothing to record, and the next backward tries again.
  if (!expects_gradients_ || static_graph_.recorded()) return;
  record_.note_compute_ended();
  used_.start_reduction(*group());
  unfinished_ = true;
  // All of backward has run, so no code of the program will see the gradients before they are averages.
  in_place_.decide(may_reduce_in_place(), /*unseen=*/true);
  averaging_.settle();
  const std::vector<size_t> completed = static_graph_.end_recording();
  unused_.set(static_graph_.unused());
  record_.set_ready_order(completed);
  std::vector<size_t> order = unused_.indices();
  order.insert(order.end(), completed.begin(), completed.end());
  plan_.set_order(std::move(order));
  std::fill(arrived_.begin(), arrived_.end(), true);
  for (size_t index = 0; index < parameters_.size(); ++index) store(index, {});
  for (next_bucket_ = 0; next_bucket_ < buckets_.size(); ++next_bucket_) launch(next_bucket_);
  if (!manual_finalization_) finalize();
}

void Reducer::finalize_manually() {
  const Lock lock(mutex_);
  TORCH_CHECK(manual_finalization_,
              "finalize_backward() needs require_manual_backward_finalization = True, set before forward.");
  TORCH_CHECK(unfinished_ || expects_gradients_,
              "There is no gradient reduction to finalize: call finalize_backward() once after each backward that "
              "synchronises gradients.");
  TORCH_CHECK(next_bucket_ == buckets_.size(),
              "finalize_backward() was called before all gradient buckets were ready.");
  record_.note_compute_ended();
  finalize();
}

void Reducer::finalize() {
  // This comes first, so that an error below leaves a reducer that can start anew.
  expects_gradients_ = false;
  unfinished_ = false;
  in_place_.close_memory();
  const std::vector<FuturePtr> installed = std::exchange(installed_futures_, {});
  // All are awaited even if one fails, because one that still ran would write into the buckets of the next backward.
  std::exception_ptr first_error;
  const auto attempt = [&](const auto& step) {
    try {
      step();
    } catch (...) {
      if (!first_error) first_error = std::current_exception();
    }
  };
  transfer_.begin_hand_over();
  if (before_hand_over_) attempt(before_hand_over_);
  attempt([&] {
    if (Bucket* first = averaging_.finish_weights(buckets_)) finish_bucket(*first);
  });
  for (Bucket& bucket : buckets_) attempt([&] { finish_bucket(bucket); });
  for (const FuturePtr& future : installed) attempt([&] { future->waitAndThrow(); });
  attempt([&] { used_.finish(/*keep=*/static_graph_.enabled()); });
  attempt([&] { react_to_bad_gradients(); });
  averaging_.end_backward();
  transfer_.forget_context();
  if (first_error) {
    // A peer that has not noticed yet may still write there.
    in_place_.drop_memory();
    std::rethrow_exception(first_error);
  }
  plan_.end_backward();
  record_.end_backward(buckets_.layout(), buckets_.times());
  timeline_.add(record_.last_backward(), options_);
  if (options_.lazy_bucket_allocation) {
    for (Bucket& bucket : buckets_) bucket.release();
  }
}

void Reducer::finish_bucket(Bucket& bucket) {
  if (!averaging_.finish(bucket)) return;
  bad_gradients_.look_at_averages(bucket, averaging_.has_hook());
  if (optimizer_in_backward_) {
    transfer_.note_finished(bucket);
  } else {
    transfer_.hand_over(bucket);
  }
}

ReducerStatus Reducer::status() {
  const Lock lock(mutex_);
  ReducerStatus status;
  status.iterations = record_.iterations();
  status.buckets_reduced = record_.buckets_reduced();
  status.reduced_in_place = record_.reduced_in_place();
  status.has_rebuilt_buckets = plan_.has_rebuilt();
  status.bucket_indices = buckets_.layout()->parameters;
  status.bucket_bytes = buckets_.layout()->bytes;
  status.unused_parameters = unused_.indices();
  status.ready_order = record_.ready_order();
  status.error = errors_.last();
  return status;
}

}  // namespace ours
