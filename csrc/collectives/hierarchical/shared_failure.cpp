#include "collectives/hierarchical/shared_failure.h"

#include <exception>

namespace ours {

void share_failure(TcpMesh& mesh, NodeSession& session) noexcept {
  const GroupFailure& outside = mesh.failure();
  NodeFailure& inside = session.failure();
  if (session.in_child() || (!outside.failed() && !inside.failed())) return;
  try {
    if (!outside.failed()) mesh.fail(inside.kind(), inside.message());
    if (!inside.failed()) inside.fail(outside.kind(), outside.message());
  } catch (const std::exception&) {
    // Out of memory: the next call tries again.
  }
}

}  // namespace ours
