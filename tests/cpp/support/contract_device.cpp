#include "support/device_contract.h"
#include "support/stand_in_device.h"

namespace ours::testing {

std::shared_ptr<Device> contract_device() {
  static const std::shared_ptr<Device> device = StandInDevice::make();
  return device;
}

}  // namespace ours::testing
