#include "cuda/check.h"

#include <pthread.h>

#include <atomic>
#include <string>

#include "device/device.h"

namespace ours::cuda {
namespace {

std::atomic<bool> forked_child{false};

// Set when the library is loaded, which is before it is used.
const int kWatched = pthread_atfork(nullptr, nullptr, [] { forked_child.store(true, std::memory_order_relaxed); });

/// What the user can do about the error.
std::string advice(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return ". Lower the batch size, or run fewer processes on the device";
    case cudaErrorInsufficientDriver:
      return ". There is no driver, or it is older than this CUDA: nvidia-smi shows which";
    case cudaErrorNoDevice:
      return ". Is CUDA_VISIBLE_DEVICES set to nothing?";
    case cudaErrorNoKernelImageForDevice:
      return ". Build ourddp with a CUDA that knows the device";
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
      return ". Some kernel of this process went wrong, and it can use the device no more: CUDA_LAUNCH_BLOCKING=1 "
             "shows where";
    default:
      return ". It may be of an earlier call: CUDA_LAUNCH_BLOCKING=1 shows where";
  }
}

}  // namespace

bool is_forked_child() noexcept { return kWatched == 0 && forked_child.load(std::memory_order_relaxed); }

void check_not_forked() {
  if (!is_forked_child()) return;
  throw DeviceError(
      "this process was forked from one that uses CUDA, and cannot use it: start workers by spawn or forkserver");
}

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  // CUDA remembers an error that does not last and reports it to the next query, which must not be the program's own.
  static_cast<void>(cudaGetLastError());
  const std::string text = std::string(call) + " failed: " + cudaGetErrorString(error) + " (" +
                           cudaGetErrorName(error) + ")" + advice(error);
  if (error == cudaErrorMemoryAllocation) throw DeviceOutOfMemory(text);
  throw DeviceError(text);
}

void check(CUresult error, const char* call) {
  // The driver errors that concern us have the same numbers as the runtime's.
  if (error != CUDA_SUCCESS) check(static_cast<cudaError_t>(error), call);
}

}  // namespace ours::cuda
