#pragma once

#include <vector>

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

/// Has no function if the element has no such operation.
ReduceKernel find_integer_kernel(Element element, Combine combine);
ReduceKernel find_floating_kernel(Element element, Combine combine);
inline ReduceKernel find_reduce_kernel(Element element, Combine combine) {
  const ReduceKernel found = find_integer_kernel(element, combine);
  return found.function != nullptr ? found : find_floating_kernel(element, combine);
}

FlatKernel find_flat_kernel(DType from, DType to);

/// All kernels. CUDA loads a kernel when it is first asked for, and may wait for the device then.
std::vector<const void*> all_kernels();

}  // namespace ours::cuda
