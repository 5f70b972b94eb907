#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/cuda_device.h"
#include "cuda/nccl_library.h"
#include "device/device_library.h"

namespace ours::cuda {
namespace {

// The devices for which the library is compiled, defined by the build.
#ifndef OURS_CUDA_ARCHITECTURES
#define OURS_CUDA_ARCHITECTURES "unknown devices"
#endif

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

class CudaLibrary : public DeviceLibrary {
 public:
  std::string describe() const override {
    return "CUDA " + version_text(CUDART_VERSION) + ", " + OURS_CUDA_ARCHITECTURES;
  }

  std::vector<std::string> device_names() const override {
    check_not_forked();
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error == cudaErrorNoDevice) {
      static_cast<void>(cudaGetLastError());  // it must not be what the program's own check finds
      return {};
    }
    check(error, "cudaGetDeviceCount");
    std::vector<std::string> names;
    for (int index = 0; index < count; ++index) {
      cudaDeviceProp properties{};
      check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
      names.emplace_back(properties.name);
    }
    return names;
  }

  std::shared_ptr<Device> device(int index) override {
    check_not_forked();
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& device = devices_[index];
    if (device == nullptr) {
      int count = 0;
      check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
      if (index < 0 || index >= count) {
        throw DeviceError("there is no CUDA device " + std::to_string(index) + ": this process sees " +
                          std::to_string(count));
      }
      device = std::make_shared<CudaDevice>(index);
    }
    return device;
  }

  std::string why_no_vendor_group() const override { return why_no_nccl(); }
  std::shared_ptr<Group> make_vendor_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                                           Deadline deadline) override {
    return make_nccl_group(std::move(host), std::move(device), deadline);
  }
  std::string vendor_version() const override { return nccl_version(); }

 private:
  std::mutex mutex_;
  std::map<int, std::shared_ptr<CudaDevice>> devices_;
};

}  // namespace
}  // namespace ours::cuda

// Never destroyed, because CUDA itself ends before the process's static objects do.
extern "C" __attribute__((visibility("default"))) ours::DeviceLibrary* ours_device_library(int interface_version) {
  static auto* const kLibrary = new ours::cuda::CudaLibrary;
  return interface_version == ours::kDeviceInterface ? kLibrary : nullptr;
}
