#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

// The reducer's view of a process group: the abilities of its reductions, memory for them, the plain all-reduce, and
// what all ranks have to say.

namespace ours {

/// The abilities of a backend's reductions.
struct ReductionAbilities {
  /// Divide by the number of ranks. Gloo and MPI do not, so gradients are divided on their way into the bucket.
  bool average = false;
  /// Reduce several tensors as one message, so that gradients can be reduced where they lie.
  bool pieces = false;
  /// Provide memory that is reduced without copies.
  bool heap = false;
};

/// Returns the abilities of the backend that serves `device` in `group`; none for a group written in Python.
ReductionAbilities abilities_of(c10d::ProcessGroup& group, at::Device device);

/// Returns the allocator of the memory that is reduced without copies. Only for a backend with `heap`.
std::shared_ptr<c10::Allocator> heap_of(c10d::ProcessGroup& group, at::Device device);

/// Makes a tensor of `size` elements in one dimension, in memory that is reduced without copies if the backend has it.
at::Tensor allocate_buffer(c10d::ProcessGroup& group, int64_t size, const at::TensorOptions& options);

/// Starts an all-reduce of `tensors` in place. More than one tensor needs a backend with `pieces`.
c10::intrusive_ptr<c10d::Work> start_all_reduce(c10d::ProcessGroup& group, std::vector<at::Tensor> tensors,
                                                c10d::ReduceOp::RedOpType op);

/// Returns the tensors of all ranks, which have the same shape and dtype, by rank.
std::vector<at::Tensor> gather(c10d::ProcessGroup& group, const at::Tensor& own);

}  // namespace ours
