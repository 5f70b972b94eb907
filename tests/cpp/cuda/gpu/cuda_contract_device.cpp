#include "device/device_library.h"
#include "support/device_contract.h"

namespace ours::testing {

std::shared_ptr<Device> contract_device() { return ours_device_library(kDeviceInterface)->device(0); }

}  // namespace ours::testing
