#pragma once

#include <ATen/core/Tensor.h>

namespace ours {

/// Whether only the parameter that `gradient` belongs to can see its memory, so that no other tensor of the program
/// and no pending work of autograd can. Must be called from a hook on the accumulation of that gradient. `incoming`
/// is what the hook was given; autograd keeps it until the hook returns, and it may be the same memory.
bool is_owned_by_parameter(const at::Tensor& gradient, const at::Tensor& incoming);

}  // namespace ours
