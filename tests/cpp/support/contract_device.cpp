#include "support/device_contract.h"
#include "support/stand_in_device.h"

namespace ours::testing {

namespace {

std::shared_ptr<StandInDevice> stand_in() {
  static const std::shared_ptr<StandInDevice> device = StandInDevice::make();
  return device;
}

}  // namespace

std::shared_ptr<Device> contract_device() { return stand_in(); }

std::shared_ptr<void> put_obstacle(StreamHandle stream) { return stand_in()->stop(stream); }

}  // namespace ours::testing
