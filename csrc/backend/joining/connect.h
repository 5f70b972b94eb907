#pragma once

#include <memory>

#include "backend/joining/rendezvous.h"
#include "collectives/group.h"
#include "collectives/messages/point_to_point.h"

namespace ours {

struct Connections {
  std::shared_ptr<Group> group;
  std::shared_ptr<PointToPoint> messages;
};

/// Brings the ranks of a new group together, and chooses how they communicate: through shared memory within a node,
/// over TCP between nodes. Returns when all ranks can be reached. Throws DistBackendError: the same error on all ranks
/// if one of them fails, and one that names the absent ranks after the timeout.
Connections connect_ranks(const Meeting& meeting);

/// Brings ranks together that have to be on one node. Throws MisuseError on all of them if they are not.
std::shared_ptr<NodeSession> connect_node(const Meeting& meeting);

}  // namespace ours
