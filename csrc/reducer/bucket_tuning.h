#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reducer/bucket_assignment.h"

// How large buckets should be, given what a reduction costs and when gradients arrive. Pure arithmetic, without tensors
// or communication.

namespace ours {

/// A reduction of n bytes takes latency_ns + n * ns_per_byte.
struct CommCost {
  double latency_ns = 0;
  double ns_per_byte = 0;
  /// The share of that time, 0 to 1, by which a computation that goes on meanwhile takes longer: 0 if the reduction
  /// has cores or an engine of its own, 1 if it takes the core that computes. Reductions that are hidden behind the
  /// computation (see overlap.h) cost that much all the same.
  double slowdown = 0;
};

/// A reduction that was measured.
struct CommSample {
  int64_t bytes = 0;
  double ns = 0;
};

/// Fits a line through the samples with the smallest relative errors: a small message counts as much as a large one.
/// Neither part is less than zero. Throws InvalidArgument unless there are two sizes, and all times are positive.
CommCost fit_cost(const std::vector<CommSample>& samples);

/// When the gradients of one backward arrive.
struct BackwardProfile {
  std::vector<GradientInfo> gradients;
  /// Indices of the gradients in the order of arrival.
  std::vector<size_t> order;
  /// Parallel to `gradients`.
  std::vector<double> arrival_ns;
};

/// Makes the profile of a backward that has not been seen: it takes as long as the communication, and each gradient
/// takes a share of that time by its bytes.
BackwardProfile even_profile(std::vector<GradientInfo> gradients, std::vector<size_t> order, const CommCost& cost);

/// Returns how long a backward with these buckets, reduced one after another in this order, lasts after the last
/// gradient.
double exposed_ns(const Buckets& buckets, const BackwardProfile& profile, const CommCost& cost);

/// Returns what such a backward adds to the step, by the rule of choose_caps().
double added_ns(const Buckets& buckets, const BackwardProfile& profile, const CommCost& cost);

/// A choice of caps for assign_buckets(): the first bucket's, and that of the others.
struct BucketCaps {
  int64_t first = 0;
  int64_t others = 0;
};

/// How far a Reducer has come with finding the size of its buckets.
struct BucketTuning {
  bool enabled = false;
  CommCost cost;
  /// Backwards that are still to be seen before the caps are chosen.
  int64_t backwards_left = 0;
  /// Zeros until they are chosen.
  BucketCaps caps;

  bool settled() const { return caps.others > 0; }
};

/// Chooses the cap, a power of two from 64 KiB up, that makes the step shortest.
///
/// Small buckets let the reductions start early and leave little to do at the end, but each costs the latency once
/// more. The sum of three parts is minimised: the exposed time; the time by which the hidden rest slows the
/// computation down; and the latency of every reduction, since even hidden ones take a core from the computation when
/// they start and end. Of the caps within 2 % of the best, the largest is taken. The first bucket is no larger than
/// `first_cap`. Throws InvalidArgument if the profile's order is no permutation.
BucketCaps choose_caps(const BackwardProfile& profile, const CommCost& cost, int64_t first_cap);

}  // namespace ours
