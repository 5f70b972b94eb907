#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

// Who may look at gradients while backward goes on.

namespace ours {

/// Whether a node of autograd that is written in another language than C++ belongs to a library that leaves the
/// gradients of parameters alone, and not to the program.
using IsLibraryCode = std::function<bool(torch::autograd::Node&)>;

/// Whether the backward that this thread is in brings the gradients of all `awaited`, the nodes that accumulate them,
/// and runs no code of the program, which might look at any gradient: no hook, no function that the program has added
/// to autograd, no dispatch mode. Where that cannot be told, it is false. Without `is_library_code`, nothing that is
/// not written in C++ is trusted.
///
/// A walk through the nodes of the graph. What autograd does not tell about them is not seen: hooks that unpack saved
/// tensors, among them the second forward of a checkpoint; operators of tensor subclasses; hooks of the tensor that
/// backward was called on, which have run by now, but may have left a callback for the end of backward.
bool backward_runs_unseen(const std::vector<const torch::autograd::Node*>& awaited,
                          const IsLibraryCode& is_library_code);

}  // namespace ours
