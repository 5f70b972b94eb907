#pragma once

#include <memory>

#include "collectives/group.h"
#include "collectives/messages/point_to_point.h"

namespace ours {

/// The group of one rank: every collective is a copy. No thread, no shared memory.
std::shared_ptr<Group> make_solo_group();

/// A rank alone has nobody to send to: every transfer throws InvalidArgument.
std::shared_ptr<PointToPoint> make_solo_point_to_point();

}  // namespace ours
