#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "backend/device/device_side.h"

namespace ours {

/// A tensor of `size` elements, one dimension, on the device of `side`, whose reductions need no copies where all ranks
/// use such tensors; ordinary memory of torch's where there is no group for the device yet, or it has none to give.
/// Dropped, its memory is used again when the device has come to where two streams are by then: that in which it was
/// made, and the current one of the thread that drops it, which may be one of ours (Disposal). Whoever uses it in
/// others lets the first one wait for them, as with torch's memory. May outlive the group.
at::Tensor make_device_tensor(const std::shared_ptr<DeviceSide>& side, int64_t size, const at::TensorOptions& options);

}  // namespace ours
