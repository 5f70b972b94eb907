#include "cuda/reduce_launch.h"

namespace ours::cuda {
namespace {

template <class Spec>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ ReduceTask task) {
  ReduceThread<Spec>::run(task, blockIdx.x, threadIdx.x);
}

struct MakeKernel {
  using Made = ReduceKernel;
  template <class Spec>
  static Made make() {
    return {reinterpret_cast<const void*>(&reduce_kernel<Spec>), shape_of<Spec>()};
  }
};

}  // namespace

ReduceKernel find_reduce_kernel(Element element, Combine combine) {
  return ReduceTable<MakeKernel>::find(element, combine);
}

}  // namespace ours::cuda
