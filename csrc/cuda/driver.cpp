#include "cuda/driver.h"

#include <string>

#include "device/device.h"

namespace ours::cuda {
namespace {

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
