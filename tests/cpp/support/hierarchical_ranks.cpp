#include "support/hierarchical_ranks.h"

#include <map>

#include "support/engine_ranks.h"

namespace ours::testing {

Topology topology_of(int ranks, const NodeOf& node_of) {
  std::map<int, int> leaders;
  std::vector<int> leader_of_rank;
  for (int r = 0; r < ranks; ++r) leader_of_rank.push_back(leaders.try_emplace(node_of(r), r).first->second);
  return Topology::of(leader_of_rank);
}

HierarchicalRanks::HierarchicalRanks(int ranks, const NodeOf& node_of, const HierarchicalConfig& config)
    : topology(topology_of(ranks, node_of)), limits(config.limits), sessions(static_cast<size_t>(ranks)) {
  for (int node = 0; node < topology.nodes(); ++node) {
    const std::vector<int>& members = topology.ranks_of(node);
    const Sessions own = make_sessions(static_cast<int>(members.size()), config.chunk, {true, 0, config.sockets});
    for (size_t r = 0; r < own.size(); ++r) sessions[static_cast<size_t>(members[r])] = own[r];
  }
  TcpConfig tcp = loopback_config();
  tcp.plan.streams = config.streams;
  tcp.plan.wire = config.wire;
  if (const size_t chunk = config.wire_chunk != 0 ? config.wire_chunk : config.chunk; chunk != 0) {
    tcp.plan.chunk_bytes = chunk;
    tcp.plan.rules = "all sent<=1024 whole;all direct";
  }
  if (config.chunk != 0) tcp.plan.rules += ";" + small_node_rules(config.chunk);
  if (!config.rules.empty()) tcp.plan.rules = config.rules;
  meshes = make_meshes(ranks, tcp);
  if (config.engine_polls) connect_engines(meshes, *config.engine_polls);
}

std::shared_ptr<HierarchicalGroup> HierarchicalRanks::group(int rank) const {
  const auto at = static_cast<size_t>(rank);
  return std::make_shared<HierarchicalGroup>(topology, sessions[at], meshes[at], limits);
}

void HierarchicalRanks::run(const std::function<void(HierarchicalGroup&)>& fn) const {
  run_ranks(topology.size(), [&](int rank) { fn(*group(rank)); });
}

}  // namespace ours::testing
