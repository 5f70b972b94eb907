#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "reducer/bucket_assignment.h"

namespace ours {

/// The state of a Reducer.
struct ReducerStatus {
  int64_t iterations = 0;
  int64_t buckets_reduced = 0;
  /// How many gradients the last backward reduced in place, without copying them into a bucket.
  int64_t reduced_in_place = 0;
  bool has_rebuilt_buckets = false;
  Buckets bucket_indices;
  std::vector<int64_t> bucket_bytes;
  std::vector<size_t> unused_parameters;
  /// The parameters in the order in which their gradients arrived in the last backward.
  std::vector<size_t> ready_order;
  /// The last error; empty if there was none.
  std::string error;
};

}  // namespace ours
