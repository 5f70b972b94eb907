#include "cuda/driver.h"

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

// CUDA 11.7 has the newest versions of these functions.
constexpr unsigned kVersion = 11080;

template <class Function>
void find(Function& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &result), name);
#elif CUDART_VERSION >= 12000
  check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result), name);
#else
  check(cudaGetDriverEntryPoint(name, &found, cudaEnableDefault), name);
  result = cudaDriverEntryPointSuccess;
#endif
  if (result != cudaDriverEntryPointSuccess || found == nullptr) {
    throw DeviceError(std::string("the CUDA driver has no ") + name + " of CUDA " + std::to_string(kVersion / 1000) +
                      "." + std::to_string(kVersion % 1000 / 10) + ": update the driver");
  }
  function = reinterpret_cast<Function>(found);
}

Driver find_all() {
  Driver all{};
  find(all.device_get, "cuDeviceGet");
  find(all.device_uuid, "cuDeviceGetUuid");
  find(all.retain, "cuDevicePrimaryCtxRetain");
  find(all.push, "cuCtxPushCurrent");
  find(all.pop, "cuCtxPopCurrent");
  return all;
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
  throw DeviceError(std::string(call) + " failed: " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")" +
                    advice(error));
}

void check(CUresult error, const char* call) {
  // The driver errors that concern us have the same numbers as the runtime's.
  if (error != CUDA_SUCCESS) check(static_cast<cudaError_t>(error), call);
}

const Driver& driver() {
  static const Driver kDriver = find_all();
  return kDriver;
}

ContextGuard::ContextGuard(CUcontext context) {
  check_not_forked();
  check(driver().push(context), "cuCtxPushCurrent");
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
}

ContextGuard::~ContextGuard() {
  static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  CUcontext popped = nullptr;
  static_cast<void>(driver().pop(&popped));
}

}  // namespace ours::cuda
