#pragma once

#include <ATen/core/Tensor.h>

// Moving one gradient in and out of its bucket.

namespace ours {

/// destination = source * scale, without recording anything for autograd.
///
/// Small CPU tensors of equal layout are copied directly: a step of a model with a thousand small parameters would
/// otherwise be spent in the dispatcher.
void copy_scaled(const at::Tensor& destination, const at::Tensor& source, double scale);

/// Reports in words why `gradient` cannot go into a bucket through `view` (dtype, device, number of elements); empty if
/// it can.
std::string describe_gradient_misfit(const at::Tensor& gradient, const at::Tensor& view);

/// A sparse gradient of `parameter` without any elements. Rows are what is sparse, as in an embedding's gradient.
at::Tensor empty_sparse_gradient(const at::Tensor& parameter);

}  // namespace ours
