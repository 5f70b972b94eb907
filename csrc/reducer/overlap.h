#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "reducer/bucket_assignment.h"

// How much of the communication was hidden behind the computation of backward, and how much was exposed, so that the
// program had to wait for it. Pure arithmetic.

namespace ours {

/// When things happened to a bucket in one backward, in nanoseconds of the steady clock; -1: did not happen.
struct BucketTimes {
  int64_t first_gradient = -1;
  int64_t last_gradient = -1;
  /// When the bucket was handed to the process group or the communication hook.
  int64_t launched = -1;
  /// When the backend began with it, or if the backend does not tell, when the bucket was handed over.
  int64_t reduction_began = -1;
  /// When the backend had ended it, or if the backend does not tell, when the end of backward found it done.
  int64_t reduction_ended = -1;
  /// Whether reduction_ended is the true end.
  bool end_is_exact = false;
};

/// The buckets of a model: which parameters are in each, and its bytes.
struct BucketLayout {
  Buckets parameters;
  std::vector<int64_t> bytes;
};

/// When things happened in one backward, in nanoseconds of the steady clock.
struct BackwardTimes {
  /// The iteration of this backward, counted from 1; 0 if there was none yet, and then nothing else is set.
  int64_t iteration = 0;
  /// When forward began, if it counted the step; otherwise -1.
  int64_t forward_began = -1;
  /// When forward handed over its outputs.
  int64_t began = -1;
  /// When autograd had computed every gradient.
  int64_t compute_ended = -1;
  /// When all averages were where the optimizer finds them.
  int64_t ended = -1;
  std::shared_ptr<const BucketLayout> layout;
  /// Parallel to the layout.
  std::vector<BucketTimes> buckets;
};

/// For each bucket, its exposed time: the nanoseconds after the end of the computation in which backward waited for it.
/// Reductions run one after another, so a bucket's time counts from the end of those before it. The rest of busy_time()
/// was hidden behind the computation, which it may have slowed down.
std::vector<int64_t> exposed_times(const BackwardTimes& times);

/// The nanoseconds in which at least one reduction was under way.
int64_t busy_time(const BackwardTimes& times);

}  // namespace ours
