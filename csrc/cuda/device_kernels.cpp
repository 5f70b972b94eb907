#include "cuda/cuda_device.h"
#include "cuda/flat_launch.h"
#include "cuda/kernels.h"
#include "cuda/reduce_launch.h"
#include "device/device_checks.h"

// How the device's kernels are launched.

namespace ours::cuda {
namespace {

template <class Task>
void launch(const void* kernel, const Task& task, size_t blocks, StreamHandle stream) {
  void* parameters[] = {const_cast<Task*>(&task)};
  check(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), parameters, 0,
                         static_cast<cudaStream_t>(stream)),
        "cudaLaunchKernel");
}

void launch_moves(CUcontext context, const std::vector<Move>& moves, DType from, DType to, double scale,
                  StreamHandle stream) {
  const FlatKernel kernel = find_flat_kernel(from, to);
  const std::vector<FlatLaunch> launches = plan_launches(moves, scale, kernel.shape);
  const ContextGuard guard(context);
  for (const FlatLaunch& one : launches) launch(kernel.function, one.task, one.blocks, stream);
}

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
  for (int from = 0; from <= static_cast<int>(DType::Opaque8); ++from) {
    for (int to = 0; to <= static_cast<int>(DType::Opaque8); ++to) {
      load(find_flat_kernel(static_cast<DType>(from), static_cast<DType>(to)).function);
    }
  }
}

void CudaDevice::reduce(const std::vector<void*>& results, const std::vector<const void*>& sources, size_t count,
                        DType dtype, const Reduction& reduction, StreamHandle stream) {
  check_device_reduction(results.size(), sources.size(), dtype, reduction);
  const kernels::ReducePlan plan = kernels::plan_reduction(dtype, count, reduction);
  const ReduceKernel kernel = find_reduce_kernel(plan.element, plan.combine);
  const ReduceLaunch planned = plan_launch(results, sources, plan, kernel.shape);
  if (planned.blocks == 0) return;
  const ContextGuard guard(context_);
  launch(kernel.function, planned.task, planned.blocks, stream);
}

void CudaDevice::flatten(void* flat, DType flat_type, const std::vector<FlatPiece>& pieces, DType piece_type,
                         double scale, StreamHandle stream) {
  check_conversion(flat_type, piece_type);
  launch_moves(context_, moves_into(flat, flat_type, pieces), piece_type, flat_type, scale, stream);
}

void CudaDevice::unflatten(const void* flat, DType flat_type, const std::vector<FlatPiece>& pieces, DType piece_type,
                           double scale, StreamHandle stream) {
  check_conversion(flat_type, piece_type);
  launch_moves(context_, moves_out_of(flat, flat_type, pieces), flat_type, piece_type, scale, stream);
}

}  // namespace ours::cuda
