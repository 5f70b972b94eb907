#pragma once

#include <vector>

#include "collectives/group.h"
#include "collectives/scratch.h"
#include "collectives/tcp/tcp_facts.h"
#include "transport/tcp/tcp_call.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

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

  const Running& running;
  TcpCall tcp;
  const TcpPlan& plan;
  Scratch& scratch;
  const std::vector<int>& all;  ///< the ranks, 0 to size - 1
  const int rank;
  const int size;
};

}  // namespace ours
