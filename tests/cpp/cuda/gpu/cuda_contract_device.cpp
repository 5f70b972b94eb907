#include <cuda_runtime_api.h>

#include <atomic>
#include <thread>

#include "device/device_library.h"
#include "support/device_contract.h"
#include "support/testing.h"

namespace ours::testing {

std::shared_ptr<Device> contract_device() { return ours_device_library(kDeviceInterface)->device(0); }

/// A host function in the stream, which returns when it may; after a while in any case, since under compute-sanitizer
/// CUDA waits for it where it waits for nothing otherwise.
std::shared_ptr<void> put_obstacle(StreamHandle stream) {
  using Flag = std::shared_ptr<std::atomic<bool>>;
  const Flag removed = std::make_shared<std::atomic<bool>>(false);
  const auto wait = [](void* data) {
    const std::unique_ptr<Flag> flag(static_cast<Flag*>(data));
    const Deadline patience = Deadline::after(std::chrono::seconds(15));
    while (!**flag && !patience.passed()) std::this_thread::yield();
  };
  CHECK_EQ(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), wait, new Flag(removed)), cudaSuccess);
  return {removed.get(), [removed](void*) { *removed = true; }};
}

}  // namespace ours::testing
