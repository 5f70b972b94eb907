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

/// What a backend is known to do in a reduction.
struct ReductionAbilities {
  /// Divide by the number of ranks. Gloo and MPI do not, so gradients are divided on their way into the bucket.
  bool average = false;
  /// Reduce several tensors as one message, so that gradients can be reduced where they lie.
  bool pieces = false;
  /// Give memory that is reduced without copies.
  bool heap = false;
};

/// Of the backend that serves `device` in `group`.
ReductionAbilities abilities_of(c10d::ProcessGroup& group, at::Device device);

/// The allocator of that memory. Only where the backend has it.
std::shared_ptr<c10::Allocator> heap_of(c10d::ProcessGroup& group, at::Device device);

/// A tensor of `size` elements, one dimension, in memory that the backend reduces without copies, if it has such.
at::Tensor allocate_buffer(c10d::ProcessGroup& group, int64_t size, const at::TensorOptions& options);

/// Starts an all-reduce of `tensors` in place; of several only where the backend reduces pieces.
c10::intrusive_ptr<c10d::Work> start_all_reduce(c10d::ProcessGroup& group, std::vector<at::Tensor> tensors,
                                                c10d::ReduceOp::RedOpType op);

}  // namespace ours
