#pragma once

#include <ATen/core/Tensor.h>

namespace ours {

/// Whether nobody but the parameter that it is the gradient of can see the memory of `gradient`: no other tensor of the
/// program, and nothing that autograd has still to run. To be asked from a hook on the accumulation of that gradient:
/// `incoming` is what the hook was given, which autograd keeps until the hook returns and which may be the same memory.
bool is_owned_by_parameter(const at::Tensor& gradient, const at::Tensor& incoming);

}  // namespace ours
