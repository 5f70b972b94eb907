#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "reducer/autograd_hooks.h"
#include "reducer/averaging.h"
#include "reducer/backward_timeline.h"
#include "reducer/bad_gradients.h"
#include "reducer/bucket_list.h"
#include "reducer/bucket_plan.h"
#include "reducer/gradient_transfer.h"
#include "reducer/in_place_reduction.h"
#include "reducer/pass_count.h"
#include "reducer/reducer_errors.h"
#include "reducer/reducer_options.h"
#include "reducer/reducer_status.h"
#include "reducer/static_graph.h"
#include "reducer/step_record.h"
#include "reducer/unused_parameters.h"
#include "reducer/used_map.h"

namespace ours {

/// Averages gradients over a process group while backward is still running.
///
/// A step is prepare_for_forward(), forward, prepare_for_backward() and backward. During backward, autograd reports
/// each gradient, and full buckets are reduced in bucket order; its final callback waits for the reductions and writes
/// the averages to the parameters' gradients. Without prepare_for_backward() a step only accumulates gradients.
/// prepare_for_backward() may also be called without prepare_for_forward(), for example for the last of several
/// micro-batches; that counts as a step, too. With set_passes() a step is prepare_for_backward(), that number of
/// backwards, and reduce_missing().
///
/// The first buckets are those of the options. Without find_unused_parameters, or with a static graph, they are rebuilt
/// once, in the order in which gradients arrived on rank 0. All functions are thread-safe, and none of them needs the
/// GIL.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  using FuturePtr = Averaging::FuturePtr;
  using GroupPtr = Averaging::GroupPtr;

  /// All of `parameters` must require gradients, and every rank of `group` must pass the same ones in the same order.
  /// Throws RuntimeError or InvalidArgument if `options` do not match them.
  static std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters, GroupPtr group, ReducerOptions options);

  // The step.

  void prepare_for_forward() {
    const Lock lock(mutex_);
    record_.begin_forward();
  }
  /// `outputs`, those of forward, are needed only to find unused parameters. Throws a RuntimeError that names the
  /// parameters that the last backward left without a gradient, if there are any.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  /// Called instead of prepare_for_backward if gradients only accumulate.
  void prepare_for_accumulation() {
    const Lock lock(mutex_);
    open_memory();
  }
  /// Must be called before any forward: memory that was prepared for gradients must not go to activations, even if no
  /// backward has used it.
  void close_memory() {
    const Lock lock(mutex_);
    in_place_.close_memory();
  }
  /// Autograd calls this when it has accumulated the gradient of a parameter out of `incoming` (see AutogradHooks).
  void on_gradient(size_t index, const at::Tensor& incoming);
  /// Reduces what the backwards of this step have not completed, with zeros for gradients that are undefined, and hands
  /// the averages over. Does nothing if all has been reduced. For set_passes(), outside of backward.
  void reduce_missing() {
    const Lock lock(mutex_);
    if (!expects_gradients_) return;
    // No code of the program runs until this returns.
    if (!std::exchange(unfinished_, true)) in_place_.decide(may_reduce_in_place(), /*unseen=*/true);
    for (size_t index = 0; index < parameters_.size(); ++index) {
      if (!arrived_[index]) mark_ready(index, {});
    }
    finalize();
  }
  /// Ends the first backward of a static graph: reduces everything now that the graph is known.
  void delay_all_reduce();
  /// Assigns the buckets in the order of arrival, once. Returns whether it did. Collective when it does.
  bool rebuild_buckets();
  /// Throws RuntimeError unless the last backward has been finalised.
  void check_finalized() {
    const Lock lock(mutex_);
    require_idle();
  }

  // Settings.

  /// Throws RuntimeError if there is a hook already, or while gradients are being reduced. A hook registered between
  /// forward and backward applies to that backward.
  void register_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  /// Sets the weight of this rank's gradients in the next backward that reduces them: they are added up, and divided by
  /// the sum of all ranks' weights. See Weights.
  void set_weight(double weight) {
    const Lock lock(mutex_);
    TORCH_CHECK(!unfinished_,
                "set_weight() cannot be called while gradients are being reduced. Call it before backward.");
    averaging_.weights().set(weight);
    use_weights();
  }
  /// Has weights travel with the reductions, though this rank has set none.
  void use_weights() {
    const Lock lock(mutex_);
    if (averaging_.weights().in_use()) return;
    averaging_.weights().use();
    renew_buckets();
  }
  /// Whether a backward that reduces gradients is due, or under way.
  bool expects_gradients() {
    const Lock lock(mutex_);
    return expects_gradients_;
  }
  bool uses_weights() const { return averaging_.weights().in_use(); }
  /// Has `passes` gradients of each parameter be reduced as one, where nothing knows of forward or of when backward
  /// begins. With 0, as at first, each backward after prepare_for_backward() is reduced.
  void set_passes(size_t passes) {
    const Lock lock(mutex_);
    passes_.set_passes(passes);
  }
  /// With set_passes(): whether gradients have arrived since the last prepare_for_backward().
  bool has_gradients() {
    const Lock lock(mutex_);
    return passes_.begun();
  }
  void set_static_graph();
  /// Whether the backward under way has nothing to record: the static graph is known, or no parameter is reached, as
  /// in torch.autograd.grad() with respect to the input.
  bool static_graph_recorded() const { return static_graph_.recorded() || !hooks_.will_call(); }
  /// Declares that the averages are used up during backward, so that they are not copied into the parameters'
  /// gradients.
  void set_optimizer_in_backward() { optimizer_in_backward_ = true; }
  /// Declares that gradients arrive in `dtype`, and gives the buckets that type. The averages are converted to the
  /// parameters' precision.
  void set_mixed_precision_dtype(at::ScalarType dtype) {
    const Lock lock(mutex_);
    mixed_precision_dtype_ = dtype;
    renew_buckets();
  }
  /// `restore` is called when all gradients have arrived, before the averages go into them.
  void set_before_hand_over(std::function<void()> restore) { before_hand_over_ = std::move(restore); }
  /// Has the phases of every `rate`-th step timed (see StepRecord).
  void set_sample_rate(int64_t rate) { record_.set_sample_rate(rate); }
  /// Adds futures that the next end of backward waits for.
  void install_futures(std::vector<FuturePtr> futures) {
    const Lock lock(mutex_);
    for (FuturePtr& future : futures) installed_futures_.push_back(std::move(future));
  }
  /// With `required`, backward does not end by itself but by finalize_manually().
  void set_manual_finalization(bool required);
  bool should_finalize_after_backward() const { return manual_finalization_ && plan_.rebuilds(); }
  void finalize_manually();
  void remove_autograd_hooks() { hooks_.detach(); }
  /// Forgets an unfinished backward and the rebuilt buckets, for example after the failure of a peer.
  void reset_state();
  void set_process_group(GroupPtr group);

  // Uneven inputs.

  /// See Averaging.
  void set_forward_work(Averaging::WorkPtr work, bool use_static_world_size) {
    const Lock lock(mutex_);
    averaging_.set_forward_work(std::move(work), use_static_world_size);
  }
  void set_joined_division(bool use_static_world_size) { averaging_.set_joined_division(use_static_world_size); }
  /// Acts as if the gradients had arrived in the order of the parameters, and takes part in the last collective of the
  /// others' backward.
  void push_all_rebuilt_parameters() {
    const Lock lock(mutex_);
    plan_.skip_backward();
    ++joined_backwards_;
    react_to_bad_gradients();
  }
  std::vector<c10d::GradBucket> zero_buckets() {
    const Lock lock(mutex_);
    return buckets_.zeros();
  }
  /// Runs what the other ranks' backward runs before the first bucket.
  void run_joined_weights() {
    const Lock lock(mutex_);
    averaging_.run_joined_weights();
  }
  /// The map of used parameters of a rank without input.
  at::Tensor unused_map() const { return used_.unused_map(); }
  /// How many ranks used each parameter in the last reduced backward: int32, one element for each parameter.
  at::Tensor used_map() const { return used_.last_reduced(); }
  /// Runs the hook, or without one the reduction that the other ranks' backward runs for this bucket.
  FuturePtr run_hook(c10d::GradBucket& bucket) { return averaging_.run_joined(bucket); }
  /// Adds the bucket up over the group, without dividing.
  FuturePtr run_all_reduce(c10d::GradBucket& bucket) {
    return start_all_reduce(*group(), {bucket.getBuffer()}, c10d::ReduceOp::SUM)->getFuture();
  }

  // Reports.

  ReducerStatus status();
  /// Whether the phases of the last step were timed, and their times.
  bool is_sampled() {
    const Lock lock(mutex_);
    return record_.is_sampled();
  }
  std::map<std::string, int64_t> phase_times() {
    const Lock lock(mutex_);
    return record_.phase_times();
  }
  /// Whether no backward so far changed the set of unused parameters.
  bool graph_is_static() const { return unused_.never_changed(); }
  /// For each parameter, nanoseconds from prepare_for_backward to its gradient, in the last backward.
  std::vector<int64_t> backward_stats() {
    const Lock lock(mutex_);
    return record_.arrival_ns();
  }
  /// The times of the last backward that ended in a reduction.
  BackwardTimes backward_times() {
    const Lock lock(mutex_);
    return record_.last_backward();
  }
  BucketTuning tuning() {
    const Lock lock(mutex_);
    return plan_.tuning();
  }
  const GroupPtr& group() const { return averaging_.group(); }

 private:
  using Lock = std::lock_guard<std::recursive_mutex>;

  Reducer(std::vector<at::Tensor> parameters, GroupPtr group, ReducerOptions options);

  void attach();
  void make_buckets(const Buckets& indices);
  /// Makes the same buckets anew, for settings that change their memory.
  void renew_buckets() {
    const std::shared_ptr<const BucketLayout> layout = buckets_.layout();
    make_buckets(layout->parameters);
  }
  void renew_buckets_for_weights() {
    if (averaging_.weights().in_use()) renew_buckets();
  }
  void require_idle();

  // Gradients in, reductions out.
  bool may_reduce_in_place() const;
  void open_memory();
  void begin_reducing();
  bool runs_no_program_code() const;
  std::vector<NodePtr> accumulators() const;
  bool completes(size_t index);
  void mark_ready(size_t index, const at::Tensor& incoming);
  void store(size_t index, const at::Tensor& incoming);
  bool skips(const Bucket& bucket) const;
  void launch_ready_buckets();
  void launch(size_t index);

  // Averages back.
  void on_all_launched();
  void queue_finalization();
  void finalize();
  void finish_bucket(Bucket& bucket);
  void react_to_bad_gradients() {
    if (bad_gradients_.react(*group(), record_.iterations() + joined_backwards_)) transfer_.drop_gradients(parameters_);
  }

  /// Recursive, because a communication hook, which runs while it is held, may ask for a report.
  std::recursive_mutex mutex_;
  const std::vector<at::Tensor> parameters_;
  const ReducerOptions options_;
  std::optional<at::ScalarType> mixed_precision_dtype_;
  std::function<void()> before_hand_over_;
  std::vector<FuturePtr> installed_futures_;
  bool manual_finalization_ = false;
  bool optimizer_in_backward_ = false;

  ReducerErrors errors_;
  StepRecord record_;
  BackwardTimeline timeline_;
  Averaging averaging_;
  UsedMap used_;
  UnusedParameters unused_;
  StaticGraph static_graph_;
  PassCount passes_;
  InPlaceReduction in_place_;
  GradientTransfer transfer_;
  BadGradients bad_gradients_;
  int64_t joined_backwards_ = 0;  ///< in which this rank took part after its own inputs had ended
  BucketPlan plan_;
  BucketList buckets_;

  // The backward under way.
  bool expects_gradients_ = false;
  bool unfinished_ = false;    ///< gradients have arrived, and their averages have not been handed over
  size_t next_bucket_ = 0;     ///< the first that has not been launched
  std::vector<bool> arrived_;  ///< by parameter

  AutogradHooks hooks_;  ///< the last member, so that it detaches before the others go
};

}  // namespace ours
