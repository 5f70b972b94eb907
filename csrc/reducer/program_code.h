#pragma once

#include <torch/csrc/autograd/function.h>

#include <functional>
#include <vector>

namespace ours {

/// Whether an autograd node that is not written in C++ belongs to a library that leaves the gradients of parameters
/// alone, and not to the program.
using IsLibraryCode = std::function<bool(torch::autograd::Node&)>;

/// Whether the backward on this thread runs all of `awaited`, the nodes that accumulate gradients, and no code of the
/// program that might look at any gradient: no hook, no function that the program has added to autograd, no dispatch
/// mode. Returns false if that cannot be told. Without `is_library_code`, only what is written in C++ is trusted.
///
/// It walks through the nodes of the graph, and misses what autograd does not tell about them: hooks that unpack
/// saved tensors, among them the second forward of a checkpoint; operators of tensor subclasses; hooks of the tensor
/// that backward was called on, which have run by now, but may have left a callback for the end of backward.
bool backward_runs_no_program_code(const std::vector<const torch::autograd::Node*>& awaited,
                                   const IsLibraryCode& is_library_code);

}  // namespace ours
