#pragma once

#include <functional>

#include "collectives/group.h"
#include "collectives/hierarchical/node_map.h"
#include "collectives/hierarchical/node_watch.h"
#include "collectives/members.h"
#include "collectives/node/node_group.h"
#include "collectives/scratch.h"
#include "transport/tcp/tcp_call.h"
#include "transport/tcp/tcp_mesh.h"

namespace ours {

/// What the algorithms of a group over several nodes work with.
struct HierarchicalParts {
  const NodeMap& map;
  NodeGroup& node;
  NodeRounds& rounds;
  const TcpPlan& plan;
  NodeWatch& watch;
  Scratch& scratch;
  int rails;       ///< how many ranks of a node send large reductions, at most
  int most_peers;  ///< ranks of other nodes to which a rank may send messages directly
};

/// An operation of such a group while it is under way on this rank, with its two halves, the node and the network.
struct HierarchicalRun : HierarchicalParts {
  HierarchicalRun(const Running& operation, TcpCall& call, const HierarchicalParts& parts)
      : HierarchicalParts(parts), running(operation), tcp(call) {}

  /// The leaders of all nodes; only on one of them.
  Members leaders() {
    return {tcp, map.leaders(), static_cast<size_t>(map.here()), [this](const auto& done) { wait(done); }};
  }

  /// The node's first synchronisation, which compares its ranks' calls.
  void open(const Exchanged& exchanged = {});
  void sync();
  /// After open(): returns once all nodes are known to have made the same call.
  void agree();

  /// Moves data over the network until done(), and watches the node meanwhile. `needs_node`: whether its ranks are
  /// still needed; otherwise they may have finished the operation and left.
  void wait(const std::function<bool()>& done, bool needs_node = true);
  /// Moves what can be moved without waiting.
  void push();

  /// Runs body(), an operation of the node; the network is left to others meanwhile.
  template <class Body>
  void in_node(Body&& body) {
    tcp.without_lock(std::forward<Body>(body));
  }

  /// How many bytes go at a time between the network and the node if one operation passes on what another does.
  size_t batch_bytes() const { return 4 * plan.chunk_bytes; }

  const Running& running;
  TcpCall& tcp;
};

}  // namespace ours
