#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "collectives/hierarchical/hierarchical_group.h"
#include "support/node_ranks.h"
#include "support/tcp_ranks.h"

namespace ours::testing {

/// The node of each rank.
using NodeOf = std::function<int(int rank)>;

struct HierarchicalConfig {
  HierarchicalLimits limits;
  size_t chunk = 0;       ///< of the nodes, in bytes; 0: as by default
  size_t wire_chunk = 0;  ///< between nodes; 0: the same
  int streams = 2;
  WireType wire = WireType::Float32;
  std::optional<bool> engine_polls;  ///< an engine carries the payloads, and whether it polls
  std::string rules;
  std::vector<int> sockets{};  ///< of each node's ranks; empty: as this process is
};

Topology topology_of(int ranks, const NodeOf& node_of);

/// The ranks of a group over several nodes, as threads of this process.
struct HierarchicalRanks {
  HierarchicalRanks(int ranks, const NodeOf& node_of, const HierarchicalConfig& config = HierarchicalConfig());

  /// To be called once on each rank's thread.
  std::shared_ptr<HierarchicalGroup> group(int rank) const;
  /// Runs fn(group) on all ranks.
  void run(const std::function<void(HierarchicalGroup&)>& fn) const;

  Topology topology;
  HierarchicalLimits limits;
  Sessions sessions;  ///< by rank, as the meshes
  Meshes meshes;
};

}  // namespace ours::testing
