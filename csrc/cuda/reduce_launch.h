#pragma once

#include <vector>

#include "cuda/reduce_table.h"
#include "kernels/plan.h"

namespace ours::cuda {

/// A kernel in the form that cudaLaunchKernel() takes.
struct ReduceKernel {
  const void* function = nullptr;
  ReduceShape shape;
};

/// Has no function if the element has no such operation.
ReduceKernel find_reduce_kernel(Element element, Combine combine);

/// A kernel's parameters, and how many blocks of kThreads threads it takes; 0 if there is nothing to do.
struct ReduceLaunch {
  ReduceTask task;
  size_t blocks;
};

/// Throws InvalidArgument if a buffer is not aligned for its elements.
ReduceLaunch plan_launch(const std::vector<void*>& results, const std::vector<const void*>& sources,
                         const kernels::ReducePlan& plan, const ReduceShape& shape);

}  // namespace ours::cuda
