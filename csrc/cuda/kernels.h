#pragma once

#include "cuda/reduce_table.h"

// The kernels, in the form that cudaLaunchKernel() takes.

namespace ours::cuda {

struct ReduceKernel {
  const void* function = nullptr;
  ReduceShape shape;
};

/// Has no function if the element has no such operation.
ReduceKernel find_reduce_kernel(Element element, Combine combine);

}  // namespace ours::cuda
