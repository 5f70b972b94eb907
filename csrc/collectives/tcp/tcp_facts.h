#pragma once

#include "collectives/group.h"
#include "transport/tcp/tcp_call.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// What a call over TCP has to know of an operation: what its peers compare it with, and how to say that they differ.
TcpCall::Facts facts_of(TcpMesh& mesh, const Running& run);

}  // namespace ours
