#pragma once

#include <vector>

#include "cuda/reduce_body.h"
#include "kernels/plan.h"

namespace ours::cuda {

/// A kernel's parameters, and how many blocks of kThreads threads it takes; 0 if there is nothing to do.
struct ReduceLaunch {
  ReduceTask task;
  size_t blocks;
};

/// Throws InvalidArgument if a buffer is not aligned for its elements.
ReduceLaunch plan_launch(const std::vector<void*>& results, const std::vector<const void*>& sources,
                         const kernels::ReducePlan& plan, const ReduceShape& shape);

}  // namespace ours::cuda
