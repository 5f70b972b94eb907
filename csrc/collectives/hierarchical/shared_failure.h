#pragma once

#include "transport/node/node_session.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// Makes a failure of the mesh one of the node, and the other way round.
void share_failure(TcpMesh& mesh, NodeSession& session) noexcept;

}  // namespace ours
