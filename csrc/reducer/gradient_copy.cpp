#include "reducer/gradient_copy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/StringUtil.h>

#include <cstring>
#include <vector>

namespace ours {
namespace {

/// ATen's kernels use several threads for more elements, and those pay off.
constexpr int64_t kDirectCopyMaxNumel = 32768;

bool can_copy_directly(const at::Tensor& destination, const at::Tensor& source) {
  return source.numel() <= kDirectCopyMaxNumel && source.device().is_cpu() && destination.device().is_cpu() &&
         source.layout() == at::kStrided && source.scalar_type() == destination.scalar_type() &&
         source.sizes() == destination.sizes() && source.strides() == destination.strides() &&
         destination.is_non_overlapping_and_dense() && !source.is_conj() && !source.is_neg() &&
         !destination.is_conj() && !destination.is_neg();
}

template <typename T>
void scale_into(void* destination, const void* source, int64_t count, double scale) {
  auto* to = static_cast<T*>(destination);
  const auto* from = static_cast<const T*>(source);
  const T factor = static_cast<T>(scale);
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
}

bool copy_directly(const at::Tensor& destination, const at::Tensor& source, double scale) {
  void* to = destination.mutable_data_ptr();
  const void* from = source.const_data_ptr();
  if (scale == 1.0) {
    std::memcpy(to, from, source.nbytes());
  } else if (source.scalar_type() == at::kFloat) {
    scale_into<float>(to, from, source.numel(), scale);
  } else if (source.scalar_type() == at::kDouble) {
    scale_into<double>(to, from, source.numel(), scale);
  } else {
    return false;
  }
  // A backward that saved the tensor must be able to see the change.
  destination.unsafeGetTensorImpl()->bump_version();
  return true;
}

}  // namespace

void copy_scaled(const at::Tensor& destination, const at::Tensor& source, double scale) {
  if (can_copy_directly(destination, source) && copy_directly(destination, source, scale)) return;
  const at::NoGradGuard no_grad;
  if (scale == 1.0) {
    destination.copy_(source, /*non_blocking=*/true);
  } else if (destination.scalar_type() == source.scalar_type()) {
    at::Tensor result = destination;
    at::mul_out(result, source.detach(), at::scalar_tensor(scale, at::dtype(at::kDouble)));
  } else {
    destination.copy_(source, /*non_blocking=*/true);
    destination.mul_(scale);
  }
}

void scale_in_place(at::Tensor tensor, double scale) {
  const at::NoGradGuard no_grad;
  // Not through detach(), as a sparse tensor gets new values, which an alias would keep for itself.
  tensor.mul_(scale);
}

void TensorCopies::add(const at::Tensor& destination, const at::Tensor& source) {
  destinations_.push_back(destination);
  sources_.push_back(source.detach());
}

void TensorCopies::run(double scale) const {
  const at::NoGradGuard no_grad;
  if (scale != 1.0 && !in_place_.empty()) at::_foreach_mul_(in_place_, scale);
  if (destinations_.empty()) return;
  at::_foreach_copy_(destinations_, sources_, /*non_blocking=*/true);
  if (scale != 1.0) at::_foreach_mul_(destinations_, scale);
}

std::string describe_gradient_misfit(const at::Tensor& gradient, const at::Tensor& view) {
  if (gradient.layout() != at::kStrided) {
    return c10::str("it is ", gradient.layout(), ", its bucket holds dense gradients");
  }
  if (gradient.scalar_type() != view.scalar_type()) {
    return c10::str("its dtype is ", gradient.scalar_type(), ", its bucket's is ", view.scalar_type());
  }
  if (gradient.device() != view.device()) {
    return c10::str("it is on ", gradient.device(), ", its bucket is on ", view.device());
  }
  if (gradient.numel() != view.numel()) {
    return c10::str("it has ", gradient.numel(), " elements, its place in the bucket has ", view.numel());
  }
  return {};
}

at::Tensor empty_sparse_gradient(const at::Tensor& parameter) {
  std::vector<int64_t> values(parameter.sizes().begin(), parameter.sizes().end());
  values.front() = 0;
  return at::sparse_coo_tensor(at::empty({1, 0}, parameter.options().dtype(at::kLong)),
                               at::empty(values, parameter.options()), parameter.sizes());
}

}  // namespace ours
