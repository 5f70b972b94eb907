#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace ours {

/// Computes destination = source * scale, without recording anything for autograd.
///
/// Small CPU tensors of equal layout are copied directly. A model with a thousand small parameters would otherwise
/// spend its step in the dispatcher.
void copy_scaled(const at::Tensor& destination, const at::Tensor& source, double scale);

/// Computes tensor *= scale, without recording anything for autograd. The tensor may be sparse.
void scale_in_place(at::Tensor tensor, double scale);

/// Copies between tensors of one device that are made together, in few kernels.
class TensorCopies {
 public:
  void add(const at::Tensor& destination, const at::Tensor& source);
  /// Adds a tensor that is its own source.
  void scale(const at::Tensor& tensor) { in_place_.push_back(tensor.detach()); }
  /// Computes destination = source * scale for each pair, in the current stream. Nothing is recorded for autograd,
  /// which sees that the destinations change.
  void run(double scale) const;

 private:
  std::vector<at::Tensor> in_place_;
  std::vector<at::Tensor> destinations_;
  std::vector<at::Tensor> sources_;
};

/// Returns in words why `gradient` cannot go into a bucket through `view` (dtype, device, number of elements), or an
/// empty text if it can.
std::string describe_gradient_misfit(const at::Tensor& gradient, const at::Tensor& view);

/// Makes a sparse gradient of `parameter` without any elements. Its rows are sparse, as in an embedding's gradient.
at::Tensor empty_sparse_gradient(const at::Tensor& parameter);

}  // namespace ours
