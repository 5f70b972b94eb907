#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "device/device.h"

// How gradients get into a bucket and back if an accelerator's library copies them: one kernel for all of them.

namespace ours {

/// A tensor with its own memory, and its place in a flat one.
struct PlacedTensor {
  at::Tensor tensor;
  int64_t offset = 0;  ///< of its first element, in elements of the flat tensor
};

/// Whether the copies below serve `tensor`, whose place in a flat tensor is `place`: the elements of both have the
/// same order in memory, and the types can be converted.
bool can_place(const at::Tensor& tensor, const at::Tensor& place);

/// Copies each tensor, times `scale`, to its place in `flat`, in the current stream. All tensors have one type.
void flatten(Device& device, const at::Tensor& flat, const std::vector<PlacedTensor>& tensors, double scale);

/// Copies in the other direction. Autograd sees that the tensors change.
void unflatten(Device& device, const at::Tensor& flat, const std::vector<PlacedTensor>& tensors, double scale);

}  // namespace ours
