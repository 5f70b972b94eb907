#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reducer/bucket_assignment.h"
#include "reducer/program_code.h"

namespace ours {

constexpr int64_t kFirstBucketBytes = 1024 * 1024;
constexpr int64_t kBucketBytes = 25 * 1024 * 1024;

/// How a Reducer works. Vectors run parallel to the parameters unless it says otherwise.
struct ReducerOptions {
  /// The buckets of the first iteration, in the order in which they are reduced; empty: assigned by the caps below.
  Buckets bucket_indices;
  /// Empty: all dense.
  std::vector<bool> expect_sparse_gradients;
  /// The names in messages; empty: parameters are called by their index.
  std::vector<std::string> parameter_names;
  /// In bytes. The first bucket is small so that communication starts early.
  int64_t bucket_bytes_cap = kBucketBytes;
  int64_t first_bucket_bytes_cap = kFirstBucketBytes;
  /// One cap a bucket instead of the two above; empty: not used.
  std::vector<int64_t> bucket_bytes_cap_list;
  /// Choose the caps from what reductions of the group cost and when gradients arrive. If buckets are rebuilt, this
  /// happens after the first backwards; otherwise at once, as if gradients arrived evenly, if `bucket_indices` is
  /// empty.
  bool tune_bucket_size = false;
  /// Search the graph for parameters that the outputs do not depend on. Keeps the first iteration's buckets.
  bool find_unused_parameters = false;
  /// Let gradients be views of the buckets.
  bool gradient_as_bucket_view = false;
  /// Do not reduce a bucket if this rank uses none of its parameters. The ranks must agree on these buckets.
  bool skip_all_reduce_unused_params = false;
  /// Copy a bucket's gradients at once when all have arrived: fewer kernel launches on an accelerator, where this is
  /// always done.
  bool batched_grad_copy = false;
  /// Allocate a bucket with its first gradient, and drop it after backward.
  bool lazy_bucket_allocation = false;
  /// What to do about NaN and infinite values in gradients: "warn", "raise", or "skip" the step; empty: they are not
  /// looked for.
  std::string bad_gradients;
  /// False: something else reduces gradients, and autograd is left alone.
  bool attach_to_autograd = true;
  /// See backward_runs_no_program_code().
  IsLibraryCode is_library_code;

  bool is_sparse(size_t index) const { return !expect_sparse_gradients.empty() && expect_sparse_gradients[index]; }
  /// The parameter's name, or "#" and its index.
  std::string name_of(size_t index) const {
    const bool named = index < parameter_names.size() && !parameter_names[index].empty();
    return named ? parameter_names[index] : "#" + std::to_string(index);
  }
};

}  // namespace ours
