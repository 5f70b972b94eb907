#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

// Decides which gradients travel together. Pure arithmetic, without tensors or communication.

namespace ours {

/// A gradient, as far as assignment needs to know it. Only gradients of equal dtype and device share a bucket.
struct GradientInfo {
  int64_t bytes = 0;
  int dtype = 0;
  int device_type = 0;
  int device_index = -1;
  /// A sparse gradient cannot be flattened, so it travels alone.
  bool sparse = false;
};

struct BucketAssignment {
  /// For each bucket, the gradients in it.
  std::vector<std::vector<size_t>> buckets;
  /// For each bucket, the cap in bytes that closed it; 0 for a sparse gradient.
  std::vector<int64_t> caps;
};

/// Groups gradients into buckets.
///
/// Gradients are taken in `order` (indices into `gradients`; empty means 0, 1, 2, ...). A bucket closes once it holds
/// at least its cap of bytes, so a gradient larger than the cap gets through. The first bucket of each dtype and device
/// is closed by caps[0], the next by caps[1] and so on; the last cap serves all further ones.
/// Buckets come out in the order in which they closed, those that stayed open last. Without an order they are sorted by
/// their lowest index instead. Throws InvalidArgument if `caps` is empty or `order` is no permutation.
BucketAssignment assign_buckets(const std::vector<GradientInfo>& gradients, const std::vector<int64_t>& caps,
                                const std::vector<size_t>& order);

/// Writes buckets as 1 + 2 * gradient_count integers (number of buckets, their sizes, the indices), so that every rank
/// can receive them without knowing how many buckets there are.
std::vector<int64_t> encode_buckets(const std::vector<std::vector<size_t>>& buckets, size_t gradient_count);

/// Reads what encode_buckets wrote. Throws InvalidArgument unless each index below `gradient_count` occurs once.
std::vector<std::vector<size_t>> decode_buckets(const std::vector<int64_t>& code, size_t gradient_count);

}  // namespace ours
