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

/// For each bucket, the indices of the gradients in it.
using Buckets = std::vector<std::vector<size_t>>;

/// Groups gradients into buckets.
///
/// Gradients are taken in `order` (indices into `gradients`; empty means 0, 1, 2, ...). A bucket closes once it holds
/// at least its cap of bytes, so a gradient larger than the cap gets through. The first bucket of each dtype and device
/// is closed by caps[0], the next by caps[1] and so on; the last cap serves all further ones.
/// Buckets come out in the order in which they closed, those that stayed open last. Without an order they are sorted by
/// their lowest index instead. Throws InvalidArgument if `caps` is empty or `order` is no permutation.
Buckets assign_buckets(const std::vector<GradientInfo>& gradients, const std::vector<int64_t>& caps,
                       const std::vector<size_t>& order);

/// Throws InvalidArgument unless `order` has each index below `count` once.
void check_permutation(const std::vector<size_t>& order, size_t count);

}  // namespace ours
