#pragma once

#include <memory>

#include "collectives/device/enqueue_group.h"

namespace ours {

/// Makes the group of one rank over memory of `device`: every collective is a copy there. `host`, the same rank's
/// group over CPU memory, knows whether it was aborted.
std::shared_ptr<EnqueueGroup> make_device_solo_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device);

}  // namespace ours
