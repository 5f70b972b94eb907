#pragma once

#include <memory>

#include "collectives/group.h"
#include "device/device.h"

namespace ours {

/// The group of one rank over memory of `device`: every collective is a copy there, in `stream`. `host`, the same
/// rank's group over CPU memory, knows whether it was aborted.
std::shared_ptr<Group> make_device_solo_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                                              std::shared_ptr<DeviceStream> stream);

}  // namespace ours
