#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "reducer/bucket_list.h"

namespace ours {

/// The weight of this rank's gradients in the next reduction, and the sum of all ranks' weights.
///
/// Weights come into use with the first one that is set, on a rank that has run out of input also with the others'.
/// From then on each reduction adds them up, so that all ranks see it if only some have set one. They ride at the end
/// of a bucket, the carrier, and the sum is known when that bucket is back. Before a communication hook runs it has to
/// be known, as the hook may compress the gradients or use them up, and cannot be trusted with numbers that have to
/// stay exact. Then, and where no bucket can be the carrier, weights take a small reduction of their own, which is
/// started before the first bucket.
class Weights {
 public:
  /// Sets the weight of the next reduction; weights have to be in use by then. ValueError unless it is 0 or from
  /// kLeastWeight to kMostWeight.
  void set(double weight);
  bool is_set() const { return own_.has_value(); }
  bool in_use() const { return in_use_; }
  /// Brings weights into use. New buckets are needed then.
  void use() { in_use_ = true; }
  /// Forgets the weight, with the reduction that it was for.
  void forget();

  /// Makes the first bucket whose sums keep the most bits the carrier, if weights are in use and `may_ride`. The
  /// buckets must be new.
  void choose_carrier(BucketList& buckets, int ranks, bool may_ride);
  /// The carrier, or null.
  Bucket* carrier(BucketList& buckets) const { return carrier_ ? &buckets[*carrier_] : nullptr; }

  /// Writes this rank's weight to the carrier's tail.
  void write(const Bucket& carrier, int ranks) const;
  /// Reads the sum from the carrier, which has been reduced. RuntimeError if only some ranks have set a weight.
  void read(const Bucket& carrier, int ranks);

  /// Starts the reduction of the weights alone, if they are in use and have no carrier.
  void start_alone(c10d::ProcessGroup& group, at::Device device);
  /// Waits for it and takes the sum, if it is under way. RuntimeError if only some ranks have set a weight; a later
  /// call in the same backward throws the same error.
  void finish_alone(int ranks);

  /// Does what the others do in start_alone() and finish_alone(), on a rank that has no part in the sum.
  void join_alone(c10d::ProcessGroup& group, at::Device device);

  /// Waits for a reduction. If it fails before weights have ever been added up, the error says what may be the reason:
  /// the buckets of a rank that has set no weight are smaller, and it is the group that finds that out.
  void await(c10d::Work& work) const;

  /// The factor that makes an average of a sum of gradients, once the sum of weights is known; 0 if all weights are 0.
  /// Without weights in this reduction it is 1 / `divisor`.
  double factor(int divisor) const;

 private:
  bool is_alone() const { return in_use_ && !carrier_; }
  void take(const at::Tensor& sums, int significant_bits, int ranks);

  bool in_use_ = false;
  bool added_up_ = false;  ///< once at least
  std::optional<double> own_;
  std::optional<size_t> carrier_;
  double total_ = 0;
  at::Tensor alone_;
  c10::intrusive_ptr<c10d::Work> work_;
  std::exception_ptr failure_;  ///< of the reduction alone
};

}  // namespace ours
