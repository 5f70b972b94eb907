#include "cuda/cuda_device.h"
#include "cuda/kernels.h"
#include "cuda/reduce_launch.h"
#include "device/device_checks.h"

// How the device's kernels are launched.

namespace ours::cuda {
namespace {

/// Loads a kernel, if there is one.
void load(const void* kernel) {
  cudaFuncAttributes attributes{};
  if (kernel != nullptr) check(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
}

}  // namespace

void CudaDevice::load_kernels() const {
  for (int element = 0; element <= static_cast<int>(Element::C128); ++element) {
    for (int combine = 0; combine <= static_cast<int>(Combine::Xor); ++combine) {
      load(find_reduce_kernel(static_cast<Element>(element), static_cast<Combine>(combine)).function);
    }
  }
}

void CudaDevice::reduce(const std::vector<void*>& results, const std::vector<const void*>& sources, size_t count,
                        DType dtype, const Reduction& reduction, StreamHandle stream) {
  check_device_reduction(results.size(), sources.size(), dtype, reduction);
  const kernels::ReducePlan plan = kernels::plan_reduction(dtype, count, reduction);
  const ReduceKernel kernel = find_reduce_kernel(plan.element, plan.combine);
  ReduceLaunch planned = plan_launch(results, sources, plan, kernel.shape);
  if (planned.blocks == 0) return;
  const ContextGuard guard(context_);
  void* parameters[] = {&planned.task};
  check(cudaLaunchKernel(kernel.function, dim3(static_cast<unsigned>(planned.blocks)), dim3(kThreads), parameters, 0,
                         static_cast<cudaStream_t>(stream)),
        "cudaLaunchKernel");
}

}  // namespace ours::cuda
