#pragma once

#include <torch/csrc/autograd/function.h>

namespace ours {

/// Whether `node`, a torch.autograd.Function in Python, belongs to a part of torch or of this package that does nothing
/// but compute gradients: see backward_runs_no_program_code().
bool is_library_function(torch::autograd::Node& node);

}  // namespace ours
