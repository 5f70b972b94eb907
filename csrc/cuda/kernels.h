#pragma once

#include "cuda/flat_table.h"
#include "cuda/reduce_table.h"

// The kernels, in the form that cudaLaunchKernel() takes.

namespace ours::cuda {

struct ReduceKernel {
  const void* function = nullptr;
  ReduceShape shape;
};

struct FlatKernel {
  const void* function = nullptr;
  FlatShape shape;
};

/// Has no function if the element has no such operation, or the types cannot be converted.
ReduceKernel find_reduce_kernel(Element element, Combine combine);
FlatKernel find_flat_kernel(DType from, DType to);

}  // namespace ours::cuda
