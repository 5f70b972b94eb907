#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "device/device.h"

// The way of gradients into a bucket and back where an accelerator's library does it: one kernel for all of them.

namespace ours {

/// A tensor that is a part of a flat one, but for its memory.
struct PlacedTensor {
  at::Tensor tensor;
  int64_t offset = 0;  ///< of its first element, in elements of the flat tensor
};

/// Whether the copies below serve `tensor`, whose place in a flat tensor is `place`: the elements of both have one
/// order in memory, and their types are such that it can be converted.
bool can_place(const at::Tensor& tensor, const at::Tensor& place);

/// Copies each tensor, times `scale`, to its place in `flat`, in the current stream. All tensors have one type.
void flatten(Device& device, const at::Tensor& flat, const std::vector<PlacedTensor>& tensors, double scale);

/// The other way. Autograd sees that the tensors change.
void unflatten(Device& device, const at::Tensor& flat, const std::vector<PlacedTensor>& tensors, double scale);

}  // namespace ours
