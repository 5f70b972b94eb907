#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "collectives/hierarchical/hierarchical_group.h"
#include "support/engine_ranks.h"
#include "support/node_ranks.h"
#include "support/tcp_ranks.h"

namespace ours::testing {

struct HierarchicalConfig {
  int rails = 0;
  size_t chunk = 0;  ///< bytes; 0: as by default
  int streams = 2;
  WireType wire = WireType::Float32;
  std::optional<bool> engine_polls;  ///< an engine carries the payloads, and whether it polls
  std::string rules;
};

/// The topology in which rank r is on node node_of(r).
inline Topology topology_of(int ranks, const std::function<int(int)>& node_of) {
  std::map<int, int> leaders;
  std::vector<int> leader_of_rank;
  for (int r = 0; r < ranks; ++r) leader_of_rank.push_back(leaders.try_emplace(node_of(r), r).first->second);
  return Topology::of(leader_of_rank);
}

/// The sessions of the nodes' ranks, by rank.
inline std::vector<std::shared_ptr<NodeSession>> make_sessions(const Topology& topology, size_t chunk) {
  std::vector<std::shared_ptr<NodeSession>> sessions(static_cast<size_t>(topology.size()));
  for (int node = 0; node < topology.nodes(); ++node) {
    const std::vector<int>& members = topology.ranks_of(node);
    const auto count = static_cast<int>(members.size());
    NodeConfig config = NodeConfig::from_options(count);
    if (chunk != 0) config = NodeConfig{chunk, chunk / 4, 4096};
    const auto leader = NodeSession::create(0, count, config);
    for (int r = 0; r < count; ++r) {
      sessions[static_cast<size_t>(members[static_cast<size_t>(r)])] =
          r == 0 ? leader : std::make_shared<NodeSession>(r, count, leader->memory());
    }
  }
  return sessions;
}

/// One function for each rank, to be called on its thread.
inline std::vector<std::function<std::shared_ptr<Group>()>> make_hierarchical(
    int ranks, const std::function<int(int)>& node_of, const HierarchicalConfig& config = HierarchicalConfig()) {
  const Topology topology = topology_of(ranks, node_of);
  const auto sessions = make_sessions(topology, config.chunk);
  TcpConfig tcp = loopback_config();
  tcp.plan.streams = config.streams;
  tcp.plan.wire = config.wire;
  if (config.chunk != 0) {
    tcp.plan.chunk_bytes = config.chunk;
    tcp.plan.rules = "all sent<=1024 whole;all direct";
  }
  if (!config.rules.empty()) tcp.plan.rules = config.rules;
  const auto meshes = make_meshes(ranks, tcp);
  if (config.engine_polls) connect_engines(meshes, *config.engine_polls);
  std::vector<std::function<std::shared_ptr<Group>()>> makers;
  for (size_t r = 0; r < sessions.size(); ++r) {
    HierarchicalGroup::Plan plan;
    plan.rails = config.rails;
    makers.emplace_back([topology, plan, session = sessions[r], mesh = meshes[r]] {
      session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
      return std::make_shared<HierarchicalGroup>(topology, session, mesh, plan);
    });
  }
  return makers;
}

}  // namespace ours::testing
