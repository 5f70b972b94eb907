#include "cuda/reduce_kernel.cuh"

namespace ours::cuda {

ReduceKernel find_integer_kernel(Element element, Combine combine) {
  return ReduceTable<MakeReduceKernel>::find_integer(element, combine);
}

}  // namespace ours::cuda
