#include "cuda/kernels.h"

namespace ours::cuda {
namespace {

template <class Spec>
__global__ void __launch_bounds__(kThreads) flat_kernel(const __grid_constant__ FlatTask task) {
  FlatThread<Spec>::run(task, blockIdx.x, threadIdx.x);
}

struct MakeKernel {
  using Made = FlatKernel;
  template <class Spec>
  static Made make() {
    return {reinterpret_cast<const void*>(&flat_kernel<Spec>), flat_shape_of<Spec>()};
  }
};

}  // namespace

FlatKernel find_flat_kernel(DType from, DType to) { return FlatTable<MakeKernel>::find(from, to); }

}  // namespace ours::cuda
