#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "backend/device/device_context.h"

namespace ours {

/// A tensor of `size` elements, one dimension, on the device of `context`, whose reductions need no copies where all
/// ranks use such tensors; ordinary memory of torch's where there is no group for the device yet, or it has none to
/// give. Once it is dropped, its memory is used again when the device has come to where two streams are by then: that
/// in which it was made, and the current one of the thread that drops it, which may be one of ours. If other streams
/// use it, the first one has to wait for them, as with torch's memory. May outlive the group.
at::Tensor make_device_tensor(const std::shared_ptr<DeviceContext>& context, int64_t size,
                              const at::TensorOptions& options);

}  // namespace ours
