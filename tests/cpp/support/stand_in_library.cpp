#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

#include "cuda/nccl_group.h"
#include "device/device_library.h"
#include "support/fake_nccl.h"
#include "support/stand_in_device.h"

// The stand-in devices as a library that the package can load in place of the accelerator's (make stand_in). Processes
// see the same devices; which of them are one and the same is said by the environment:
//   STAND_IN_IDENTITIES=a,a,b   device 0 and 1 are the same, 2 is another; default: eight different ones
//   STAND_IN_NCCL=1             there is a fake NCCL

namespace ours::testing {
namespace {

class StandInLibrary : public DeviceLibrary {
 public:
  std::string describe() const override { return "stand-in devices"; }

  std::vector<std::string> device_names() const override {
    const char* given = std::getenv("STAND_IN_IDENTITIES");
    std::istringstream text(given == nullptr ? "0,1,2,3,4,5,6,7" : given);
    std::vector<std::string> all;
    for (std::string one; std::getline(text, one, ',');) all.push_back("stand-in-" + one);
    return all;
  }

  std::shared_ptr<Device> device(int index) override {
    const std::vector<std::string> all = device_names();
    if (index < 0 || static_cast<size_t>(index) >= all.size()) {
      throw DeviceError("there is no stand-in device " + std::to_string(index));
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& device = devices_[index];
    if (device == nullptr) device = StandInDevice::make(StandInOptions{all[static_cast<size_t>(index)]});
    return device;
  }

  std::string why_no_vendor_group() const override {
    return std::getenv("STAND_IN_NCCL") == nullptr ? "stand-in devices have no library of a vendor's" : "";
  }
  std::shared_ptr<Group> make_vendor_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                                           Deadline deadline) override {
    auto nccl = std::make_shared<FakeNccl>(std::static_pointer_cast<StandInDevice>(device), host->size());
    return cuda::NcclGroup::make(std::move(nccl), std::move(host), std::move(device), deadline);
  }
  std::string vendor_version() const override { return ""; }

 private:
  std::mutex mutex_;
  std::map<int, std::shared_ptr<StandInDevice>> devices_;
};

}  // namespace
}  // namespace ours::testing

// Never destroyed: threads of streams may still run when the process ends.
extern "C" __attribute__((visibility("default"))) ours::DeviceLibrary* ours_device_library(int interface_version) {
  static auto* const kLibrary = new ours::testing::StandInLibrary;
  return interface_version == ours::kDeviceInterface ? kLibrary : nullptr;
}
