#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace ours::cuda {

/// Throws DeviceError with CUDA's name of the error, unless there is none. `call` is for people.
void check(cudaError_t error, const char* call);
void check(CUresult error, const char* call);

/// Whether this process was forked from one that used CUDA. No such child can use CUDA.
bool is_forked_child() noexcept;
/// Throws DeviceError in such a child.
void check_not_forked();

}  // namespace ours::cuda
