#pragma once

#include <memory>

#include "collectives/device/device_engine.h"
#include "collectives/group.h"
#include "common/options.h"
#include "device/device_library.h"

namespace ours {

struct MadeDeviceGroup {
  std::shared_ptr<Group> group;
  DeviceChoice choice;
};

/// Makes a group over device memory for the ranks of `host`, a group over CPU memory. All ranks call this at the same
/// place in the order of their calls; `call` is the one under way and appears in messages. From then on, no other
/// thread uses `host` while an operation of the new group runs. `device` is this rank's, of `library`.
///
/// Throws InvalidArgument on all ranks if `wish` cannot be granted. Any other error fails `host`.
MadeDeviceGroup make_device_group(const std::shared_ptr<Group>& host, const std::shared_ptr<Device>& device,
                                  DeviceLibrary& library, const Call& call,
                                  DeviceEngine wish = options().device_engine);

}  // namespace ours
