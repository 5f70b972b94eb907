#include <cuda_runtime_api.h>

#include <atomic>
#include <thread>

#include "device/device_library.h"
#include "support/device_contract.h"
#include "support/testing.h"

namespace ours::testing {

namespace {

/// A host function in the stream, which returns when it may.
class HostFunction : public Obstacle {
 public:
  explicit HostFunction(StreamHandle stream) {
    const auto wait = [](void* data) {
      const std::unique_ptr<Flag> flag(static_cast<Flag*>(data));
      while (!**flag) std::this_thread::yield();
    };
    CHECK_EQ(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), wait, new Flag(removed_)), cudaSuccess);
  }
  ~HostFunction() override { remove(); }
  void remove() override { *removed_ = true; }

 private:
  using Flag = std::shared_ptr<std::atomic<bool>>;
  const Flag removed_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

std::shared_ptr<Device> contract_device() { return ours_device_library(kDeviceInterface)->device(0); }

std::unique_ptr<Obstacle> put_obstacle(StreamHandle stream) { return std::make_unique<HostFunction>(stream); }

}  // namespace ours::testing
