#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <vector>

// The communication hooks that need no Python, and the questions that a reduction asks the process group.

namespace ours {

/// Returns the hook that c10d calls `type`. Both average over the group; FP16_COMPRESS sends half precision.
std::unique_ptr<c10d::CommHookInterface> make_builtin_hook(c10d::BuiltinCommHookType type,
                                                           const c10::intrusive_ptr<c10d::ProcessGroup>& group);

/// Whether the backend that serves `device` in `group` is known to average inside the reduction. Gloo and MPI do not,
/// so gradients are divided on their way into the bucket.
bool averages_in_reduction(c10d::ProcessGroup& group, at::Device device);

/// Starts an all-reduce of `tensor` in place.
c10::intrusive_ptr<c10d::Work> start_all_reduce(c10d::ProcessGroup& group, const at::Tensor& tensor,
                                                c10d::ReduceOp::RedOpType op);

}  // namespace ours
