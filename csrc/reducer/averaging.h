#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>

#include "reducer/bucket.h"
#include "reducer/group_reductions.h"
#include "reducer/weights.h"

namespace ours {

/// Averages buckets of gradients over a process group, by a communication hook if there is one and otherwise by an
/// all-reduce. Decides where gradients are divided, and by how many ranks.
///
/// A backend that can average divides in the reduction. Otherwise dense gradients are divided on their way into the
/// bucket. Sparse gradients are always divided beforehand. A communication hook divides by itself.
///
/// Once weights are in use, gradients are added up as they are, and a factor makes averages of the sums; only with
/// float16 they are divided beforehand, as the sums could overflow. What a hook
/// gets has been multiplied so that the hook's average over the ranks is the weighted one.
class Averaging {
 public:
  using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

  Averaging(GroupPtr group, c10::Device device);

  const GroupPtr& group() const { return group_; }
  void set_group(GroupPtr group);
  const ReductionAbilities& abilities() const { return abilities_; }
  bool has_hook() const { return hook_ != nullptr; }
  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook) { hook_ = std::move(hook); }

  /// `work` counts in its tensor how many ranks still have input. The next backward divides by that count, or with
  /// `use_static_world_size` by the size of the group nevertheless.
  void set_forward_work(WorkPtr work, bool use_static_world_size);
  /// Sets whether ranks that have run out of input count in averages.
  void set_joined_division(bool use_static_world_size) { use_static_world_size_ = use_static_world_size; }

  Weights& weights() { return weights_; }
  const Weights& weights() const { return weights_; }
  /// Lets one of the new buckets carry the weights, if they are in use and travel with buckets. Without `may_ride` none
  /// does, because not all buckets are reduced.
  void choose_carrier(BucketList& buckets, bool may_ride);

  void begin_backward() { divisor_ = 0; }
  /// Forgets what was for this backward alone.
  void end_backward() {
    forward_work_.reset();
    weights_.forget();
  }
  /// Decides where this backward's gradients are divided, and starts what comes before all buckets; later calls change
  /// nothing. May wait for the forward's work.
  void settle() {
    if (divisor_ == 0) decide();
  }
  /// The factor for a dense gradient on its way into the bucket.
  double scale() const { return scale_; }
  /// The divisor for a sparse gradient on its way into the bucket.
  int sparse_divisor() const { return sparse_divisor_; }
  /// The factor for what a reduction has returned.
  double result_scale() const;

  /// Starts to reduce a bucket, which is the one with `index` of `count`.
  void start(Bucket& bucket, size_t index, size_t count);
  /// Waits for what has to be known before any bucket is handed over, and returns the bucket that has to be the first,
  /// or null.
  Bucket* finish_weights(BucketList& buckets);
  /// Waits for the reduction of a bucket, whose results are in place then. Returns whether one had been started.
  bool finish(Bucket& bucket);
  /// Runs, on a rank that has run out of input, what the others run before the first bucket.
  void run_joined_weights() { weights_.join_alone(*group_, device_); }
  /// Runs, on a rank that has run out of input, what start() runs on the others.
  FuturePtr run_joined(c10d::GradBucket& bucket);

 private:
  void decide();
  /// Returns false if the hook must not run, because ranks disagree about weights.
  bool prepare_for_hook(Bucket& bucket);

  GroupPtr group_;
  const c10::Device device_;
  ReductionAbilities abilities_;
  std::unique_ptr<c10d::CommHookInterface> hook_;
  Weights weights_;
  WorkPtr forward_work_;
  bool use_static_world_size_ = true;  ///< in join(): ranks without input count as well
  bool sums_may_overflow_ = false;     ///< some gradients are float16

  // The backward under way.
  int divisor_ = 0;  ///< 0: not decided yet
  int sparse_divisor_ = 1;
  double scale_ = 1.0;
  bool in_reduction_ = false;
};

}  // namespace ours
