#pragma once

#include <ATen/core/Tensor.h>

namespace ours {

/// Computes destination = source * scale, without recording anything for autograd.
///
/// Small CPU tensors of equal layout are copied directly. A model with a thousand small parameters would otherwise
/// spend its step in the dispatcher.
void copy_scaled(const at::Tensor& destination, const at::Tensor& source, double scale);

/// Returns in words why `gradient` cannot go into a bucket through `view` (dtype, device, number of elements), or an
/// empty text if it can.
std::string describe_gradient_misfit(const at::Tensor& gradient, const at::Tensor& view);

/// Makes a sparse gradient of `parameter` without any elements. Its rows are sparse, as in an embedding's gradient.
at::Tensor empty_sparse_gradient(const at::Tensor& parameter);

}  // namespace ours
