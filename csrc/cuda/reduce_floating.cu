#include "cuda/reduce_kernel.cuh"

namespace ours::cuda {

ReduceKernel find_floating_kernel(Element element, Combine combine) {
  return ReduceTable<MakeReduceKernel>::find_floating(element, combine);
}

}  // namespace ours::cuda
