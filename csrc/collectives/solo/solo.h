#pragma once

#include <memory>

#include "collectives/group.h"
#include "collectives/messages/point_to_point.h"

namespace ours {

/// The group of a single rank: every collective is a copy. It has no threads and no shared memory.
std::shared_ptr<Group> make_solo_group();

/// A single rank has no peer: every transfer throws InvalidArgument.
std::shared_ptr<PointToPoint> make_solo_point_to_point();

}  // namespace ours
