#pragma once

#include "collectives/group.h"
#include "transport/tcp/tcp_call.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// What a call over TCP has to know of an operation: the data that its peers compare, and how to describe a
/// difference.
TcpCall::Facts facts_of(TcpMesh& mesh, const Running& run);

}  // namespace ours
