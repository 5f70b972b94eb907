#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "reducer/bucket_tuning.h"
#include "reducer/reducer_options.h"

namespace ours {

/// Describes the parameters' gradients for bucket assignment. `sparse` is parallel to them, or empty.
std::vector<GradientInfo> gradient_infos(const std::vector<at::Tensor>& parameters, const std::vector<bool>& sparse);

/// Decides which gradients share a bucket: at first by the order of the parameters, and once more by the order in which
/// gradients arrived. Chooses the size of the buckets too, if it is asked to.
class BucketPlan {
 public:
  /// Collective if the size is to be chosen, because that measures the group.
  BucketPlan(const std::vector<at::Tensor>& parameters, const ReducerOptions& options, c10d::ProcessGroup& group);

  /// The buckets of the first backward. InvalidArgument if the options give buckets that do not have each parameter
  /// once.
  Buckets first_buckets();

  /// Whether the buckets are still to be rebuilt.
  bool rebuilds() const { return may_rebuild_ && !has_rebuilt_; }
  bool has_rebuilt() const { return has_rebuilt_; }
  /// Lets a static graph rebuild its buckets even if unused parameters are searched for.
  void allow_rebuilding() { may_rebuild_ = true; }

  void begin_backward();
  void note_arrival(size_t index) {
    if (rebuilds()) order_.push_back(index);
  }
  void set_order(std::vector<size_t> order) { order_ = std::move(order); }
  void end_backward();
  /// Counts a backward that other ranks ran while this one had no input, as if gradients had arrived in the order of
  /// the parameters.
  void skip_backward();

  /// Whether it is time to rebuild: an order is known, and no further backward has to be seen before.
  bool is_due() const { return rebuilds() && !order_.empty() && tuning_.backwards_left == 0; }
  /// How many gradients are in the order of arrival.
  size_t arrived() const { return order_.size(); }
  /// Returns the buckets of all later backwards, by the order and the size that rank 0 decides. Collective.
  /// `arrival_ns` are the times of a backward, by parameter, or empty if this rank has seen none.
  Buckets rebuild(c10d::ProcessGroup& group, const std::vector<int64_t>& arrival_ns);
  /// Makes the next backward's order count as the first one's did.
  void start_anew();

  const BucketTuning& tuning() const { return tuning_; }

 private:
  void choose_size(const std::vector<size_t>& order, const std::vector<int64_t>& arrival_ns);
  BucketCaps caps() const;
  Buckets assign(const std::vector<size_t>& order, const BucketCaps& caps) const;

  const std::vector<at::Tensor>& parameters_;
  const ReducerOptions& options_;
  bool may_rebuild_;
  bool has_rebuilt_ = false;
  std::vector<size_t> order_;  ///< of arrival, until the buckets are rebuilt
  BucketTuning tuning_;
};

}  // namespace ours
