#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "backend/device/device_context.h"

namespace ours {

/// Makes a tensor of `size` elements, one dimension, on the device of `context`, whose reductions need no copies if
/// all ranks use such tensors. It has ordinary torch memory if there is no group for the device yet, or the group has
/// none to give. After the tensor is dropped, its memory is used again when the device has reached the current ends
/// of two streams: the one in which it was made, and the current one of the thread that drops it, which may be one of
/// ours. If other streams use it, the first one has to wait for them, as with torch's memory. May outlive the group.
at::Tensor make_device_tensor(const std::shared_ptr<DeviceContext>& context, int64_t size,
                              const at::TensorOptions& options);

}  // namespace ours
