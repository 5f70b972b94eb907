#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "reducer/autograd_hooks.h"
#include "reducer/bucket.h"
#include "reducer/bucket_assignment.h"
#include "reducer/bucket_tuning.h"
#include "reducer/comm_hooks.h"
#include "reducer/device_copies.h"
#include "reducer/device_streams.h"
#include "reducer/gradient_access.h"
#include "reducer/gradient_memory.h"
#include "reducer/overlap.h"
#include "reducer/reducer_options.h"
#include "reducer/step_timer.h"
#include "reducer/unused_parameters.h"

namespace ours {

/// What a Reducer tells about itself.
struct ReducerStatus {
  int64_t iterations = 0;
  int64_t buckets_reduced = 0;
  /// Gradients that were reduced where they lay in the last backward.
  int64_t reduced_in_place = 0;
  bool has_rebuilt_buckets = false;
  std::vector<std::vector<size_t>> bucket_indices;
  std::vector<int64_t> bucket_bytes;
  std::vector<size_t> unused_parameters;
  /// In the order in which their gradients arrived in the last backward.
  std::vector<size_t> ready_order;
  /// The last error; empty if there was none.
  std::string error;
};

/// What bucket assignment needs to know of the parameters' gradients. `sparse` is parallel to them, or empty.
std::vector<GradientInfo> gradient_infos(const std::vector<at::Tensor>& parameters, const std::vector<bool>& sparse);

/// Averages gradients over a process group while backward is still running.
///
/// The life of a step: prepare_for_forward; forward; prepare_for_backward; backward, in which autograd calls back for
/// each gradient, full buckets are reduced in bucket order, and the last callback of backward waits for the reductions
/// and hands the averages to the parameters. A step without prepare_for_backward only accumulates. Where a program
/// calls prepare_for_backward alone, as for the last of several micro-batches, the step counts all the same. The first
/// step's buckets follow the order of the parameters; the second step's follow the order in which the gradients
/// arrived, as seen by rank 0. Calls are safe from any thread, and none of them needs Python.
class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

  /// `parameters` all require a gradient; the same list in the same order on every rank of `group`. `options` is
  /// checked; RuntimeError or InvalidArgument if it does not fit the parameters.
  static std::shared_ptr<Reducer> create(std::vector<at::Tensor> parameters, GroupPtr group, ReducerOptions options);
  ~Reducer();

  // The step.

  void prepare_for_forward();
  /// `outputs`, of forward, are needed only to find unused parameters. RuntimeError if the last backward left
  /// parameters without a gradient; it names them.
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  /// In the place of prepare_for_backward where gradients only accumulate.
  void prepare_for_accumulation();
  /// Before any forward: what the one before it has prepared for gradients is not for activations, if there was no
  /// backward.
  void close_memory();
  /// What autograd calls when the gradient of a parameter has been accumulated, out of `incoming` (see AutogradHooks).
  void on_gradient(size_t index, const at::Tensor& incoming);
  /// Ends the first backward of a static graph: reduces everything now that the graph is known.
  void delay_all_reduce();
  /// Assigns the buckets in the order of arrival, once. Returns whether it did. Collective when it does.
  bool rebuild_buckets();
  /// RuntimeError unless the last backward has been finalised.
  void check_finalized();

  // What changes the way of working.

  /// Once, and not while gradients are being reduced. Between forward and backward the hook holds for that backward.
  void register_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void set_static_graph();
  /// Whether the backward under way has nothing to record: the static graph is known, or no parameter is reached, as
  /// in torch.autograd.grad() with respect to the input.
  bool static_graph_recorded() const { return static_recorded_ || !hooks_.will_call(); }
  /// Gradients have been consumed by the time that backward ends: do not hand them to the parameters.
  void set_optimizer_in_backward() { optimizer_in_backward_ = true; }
  /// Gradients arrive in `dtype`, and so do buckets have it; averages go into gradients of the parameters' precision.
  void set_mixed_precision_dtype(at::ScalarType dtype);
  /// `restore` is called when all gradients have arrived, before the averages go into them.
  void set_before_hand_over(std::function<void()> restore) { before_hand_over_ = std::move(restore); }
  void set_sample_rate(int64_t rate) { timer_.set_sample_rate(rate); }
  /// Futures that the next end of backward waits for.
  void install_futures(std::vector<FuturePtr> futures);
  /// With `required`, backward does not end by itself but by finalize_manually().
  void set_manual_finalization(bool required);
  bool should_finalize_after_backward() const;
  void finalize_manually();
  void remove_autograd_hooks() { hooks_.detach(); }
  /// Forgets an unfinished backward and the rebuilt buckets, e.g. after a failed peer.
  void reset_state();
  void set_process_group(GroupPtr group);

  // Uneven inputs.

  /// `work` adds up in its tensor how many ranks still have input. `use_static_world_size`: divide by the size of the
  /// group all the same.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool use_static_world_size);
  /// Whether ranks that have run out of input take part in averages over the whole group.
  void set_joined_division(bool use_static_world_size) { joined_static_world_size_ = use_static_world_size; }
  /// Acts as if the gradients had arrived in the order of the parameters.
  void push_all_rebuilt_parameters();
  std::vector<c10d::GradBucket> zero_buckets();
  /// What a rank without input adds to the map of used parameters.
  at::Tensor unused_map() const { return used_.unused_map(); }
  /// How many ranks used each parameter in the last reduced backward: int32, one element a parameter.
  at::Tensor used_map() const { return used_.last_reduced(); }

  /// Runs the hook, or without one the reduction that the other ranks' backward runs for this bucket.
  FuturePtr run_hook(c10d::GradBucket& bucket);
  /// Adds the bucket up over the group, without dividing.
  FuturePtr run_all_reduce(c10d::GradBucket& bucket);

  // What happened.

  ReducerStatus status();
  int64_t iterations();
  StepTimer& timer() { return timer_; }
  /// Whether no backward so far changed the set of unused parameters.
  bool graph_is_static() const { return graph_is_static_; }
  /// For each parameter, nanoseconds from prepare_for_backward to its gradient, in the last backward.
  std::vector<int64_t> backward_stats();
  /// One entry a bucket, of the backward under way or the last one.
  std::vector<BucketTimes> bucket_times();
  /// Of the last backward that ended in a reduction.
  BackwardTimes backward_times();
  BucketTuning tuning();
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  const ReducerOptions& options() const { return options_; }
  const GroupPtr& group() const { return group_; }

 private:
  Reducer(std::vector<at::Tensor> parameters, GroupPtr group, ReducerOptions options);

  struct Location {
    size_t bucket = 0;
    size_t slot = 0;
  };

  // reducer.cpp: set-up.
  void attach();
  void init_buckets(const std::vector<std::vector<size_t>>& indices);
  std::vector<std::vector<size_t>> assign(const std::vector<size_t>& order) const;
  bool is_sparse(size_t index) const;
  bool rebuilds_buckets() const { return (static_graph_ || !options_.find_unused_parameters) && !has_rebuilt_; }
  std::string name_of(size_t index) const;
  void require_idle();
  [[noreturn]] void fail(std::string message);

  // reducer_backward.cpp: gradients in, reductions out.
  bool records_usage() const;
  bool may_be_unused() const { return static_graph_ || options_.find_unused_parameters; }
  void begin_reducing();
  bool is_unseen() const;
  std::vector<NodePtr> accumulators() const;
  bool counts_as_arrived(size_t index);
  void settle_division();
  void mark_ready(size_t index, const at::Tensor& incoming);
  void store_gradient(size_t index, const at::Tensor& incoming);
  void store_dense(Bucket& bucket, size_t slot_index, const at::Tensor& incoming);
  bool reduces_in_place(const GradientSlot& slot, const at::Tensor& gradient, const at::Tensor& incoming) const;
  void store_sparse(Bucket& bucket, GradientSlot& slot);
  void launch_ready_buckets();
  void launch(size_t index);
  bool skips(const Bucket& bucket) const;

  // reducer_finalize.cpp: averages back.
  void on_all_launched();
  void queue_finalization();
  void finalize();
  void finish_bucket(Bucket& bucket);
  void finish_dense(Bucket& bucket);
  void hand_over(Bucket& bucket, GradientSlot& slot, std::vector<PlacedTensor>& fused);

  // reducer_copies.cpp: copies in one go, and streams.
  bool defers_copies(const Bucket& bucket) const;
  void copy_deferred(Bucket& bucket);
  void show_view(const GradientSlot& slot, const at::Tensor& copied) const;
  void order_streams(Bucket& bucket);
  void copy_back(const Bucket& bucket, const GradientSlot& slot, const at::Tensor& gradient,
                 std::vector<PlacedTensor>& fused) const;

  // reducer_memory.cpp: what gradients lie in.
  bool may_reduce_in_place() const;
  void open_memory();
  void drop_memory();
  void allocate(Bucket& bucket);
  void adopt_existing_gradients();

  // reducer_times.cpp: what is remembered of a backward.
  void note_layout();
  void note_backward_times();

  // reducer_tuning.cpp: the size of the buckets.
  void measure_group();
  void tune(const std::vector<size_t>& order);
  std::vector<int64_t> bucket_caps() const;
  void count_backward_for_tuning();

  /// Recursive: a communication hook, which runs under it, may ask for a report.
  std::recursive_mutex mutex_;
  const std::vector<at::Tensor> parameters_;
  GroupPtr group_;
  const ReducerOptions options_;
  std::optional<at::ScalarType> mixed_precision_dtype_;
  std::function<void()> before_hand_over_;

  std::vector<Bucket> buckets_;
  std::vector<Location> locations_;
  AutogradHooks hooks_;
  GradientAccess gradients_;
  std::unique_ptr<c10d::CommHookInterface> hook_;
  std::vector<FuturePtr> installed_futures_;
  StreamSet finished_in_;  ///< where the averages of the last backward were handed over

  // The backward under way.
  bool forward_prepared_ = false;  ///< the backward to come is that of a forward that has been counted
  bool expects_gradients_ = false;
  bool unfinished_ = false;  ///< gradients have arrived, and their averages have not been handed over
  bool all_launched_ = false;
  bool manual_finalization_ = false;
  bool optimizer_in_backward_ = false;
  size_t next_bucket_ = 0;
  std::vector<bool> arrived_;
  std::vector<size_t> ready_order_;
  std::vector<int64_t> arrival_ns_;
  int64_t backward_began_ns_ = 0;
  int64_t compute_ended_ns_ = -1;
  std::shared_ptr<const BucketLayout> layout_;
  BackwardTimes last_backward_;

  // Averaging: divide by divisor_ on the way into the bucket (scale_), or inside the reduction.
  ReductionAbilities backend_;
  bool whole_buckets_ = true;  ///< of the backward under way: no gradient is reduced where it lies
  bool was_seen_ = false;      ///< code of the program ran in the last backward, and will most likely in the next
  std::shared_ptr<GradientMemory> memory_;
  int divisor_ = 0;
  double scale_ = 1.0;
  bool average_in_reduction_ = false;
  c10::intrusive_ptr<c10d::Work> forward_work_;
  bool forward_static_world_size_ = true;
  bool joined_static_world_size_ = true;

  // Unused parameters and the static graph.
  UsedMap used_;
  std::vector<size_t> unused_;
  std::optional<std::vector<size_t>> first_unused_;
  bool graph_is_static_ = true;
  bool static_graph_ = false;
  bool static_recorded_ = false;
  std::vector<int> arrivals_expected_;
  std::vector<int> arrivals_left_;

  // Rebuilding.
  bool has_rebuilt_ = false;
  std::vector<size_t> rebuild_order_;
  BucketTuning tuning_;

  int64_t iterations_ = 0;
  int64_t buckets_reduced_ = 0;
  int64_t reduced_in_place_ = 0;
  StepTimer timer_;
  std::string error_;
};

}  // namespace ours
