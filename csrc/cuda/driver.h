#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <exception>

namespace ours::cuda {

/// Throws DeviceError with CUDA's name of the error, unless there is none. `call` is for people.
void check(cudaError_t error, const char* call);
void check(CUresult error, const char* call);

/// Whether this process was forked from one that used CUDA. No such child can use CUDA.
bool is_forked_child() noexcept;
/// Throws DeviceError in such a child.
void check_not_forked();

/// The functions of the driver that the runtime lacks. They are looked up by name, so that this library can be loaded
/// where there is no driver.
struct Driver {
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetUuid) device_uuid;
  decltype(&cuDevicePrimaryCtxRetain) retain;
  decltype(&cuCtxPushCurrent) push;
  decltype(&cuCtxPopCurrent) pop;
};

/// Throws DeviceError if the driver lacks one of them.
const Driver& driver();

/// While it lives, the device is the thread's current one, and calls that CUDA forbids during a capture in the
/// process are allowed, because they concern streams of ours. Afterwards all is as it was. cudaSetDevice() could not
/// restore the absence of a context: it would make one on device 0, of hundreds of megabytes.
class ContextGuard {
 public:
  /// Throws DeviceError in a forked child.
  explicit ContextGuard(CUcontext context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// For destructors: calls `end` with the device current, unless CUDA has already ended with the process, or belongs
/// to another process.
template <class End>
void end_quietly(CUcontext context, const End& end) noexcept {
  if (is_forked_child()) return;
  try {
    const ContextGuard guard(context);
    static_cast<void>(end());
  } catch (const std::exception&) {
    // There is no context any more, and so nothing to free.
  }
}

}  // namespace ours::cuda
