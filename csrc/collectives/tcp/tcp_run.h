#pragma once

#include <vector>

#include "collectives/group.h"
#include "collectives/members.h"
#include "collectives/scratch.h"
#include "transport/tcp/tcp_call.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// What a call over TCP has to know of an operation: the data that its peers compare, and how to describe a
/// difference.
TcpCall::Facts facts_of(TcpMesh& mesh, const Running& run);

/// An operation of a TcpGroup while it is under way on this rank: what its algorithms work with.
struct TcpRun {
  TcpRun(TcpMesh& mesh, const Running& operation, Scratch& memory, const std::vector<int>& ranks)
      : running(operation),
        tcp(mesh, facts_of(mesh, operation)),
        plan(mesh.plan()),
        scratch(memory),
        all(ranks),
        rank(mesh.rank()),
        size(mesh.size()) {}

  /// All ranks.
  Members members() {
    return {tcp, all, static_cast<size_t>(rank), [this](const std::function<bool()>& done) { tcp.run(done); }};
  }

  const Running& running;
  TcpCall tcp;
  const TcpPlan& plan;
  Scratch& scratch;
  const std::vector<int>& all;  ///< the ranks, 0 to size - 1
  const int rank;
  const int size;
};

}  // namespace ours
