#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "collectives/hierarchical/hierarchical_run.h"
#include "collectives/hierarchical/node_map.h"
#include "collectives/hierarchical/node_watch.h"
#include "collectives/node/node_group.h"
#include "collectives/scratch.h"
#include "collectives/select.h"
#include "collectives/tcp/tcp_group.h"
#include "transport/node/node_session.h"
#include "transport/tcp/tcp_call.h"
#include "transport/tcp/tcp_mesh.h"
#include "transport/topology.h"

namespace ours {

/// The same on all ranks.
struct HierarchicalLimits {
  /// At most that many ranks of each node send large reductions: 0 is as many as the smallest node has ranks.
  int rails = 0;
  /// If more ranks than that are on other nodes, even long messages go through one rank of each.
  int most_peers = 64;
};

/// Collectives of ranks on several nodes, by the algorithms of hierarchical_algorithms.h: shared memory within a node,
/// TCP between nodes, and no byte twice over the network. Nodes may have different numbers of ranks.
///
/// Each operation begins with a synchronisation within the node, which compares what its ranks called, and goes on
/// with messages between nodes, which compare what the nodes called, before anything is written.
class HierarchicalGroup final : public Group {
 public:
  /// `session` is that of this rank's node, with ranks numbered as topology.ranks_of() lists them; besides this group,
  /// only HierarchicalMessages may use it. `mesh` covers all ranks. Throws Error if the three do not fit together.
  HierarchicalGroup(Topology topology, std::shared_ptr<NodeSession> session, std::shared_ptr<TcpMesh> mesh,
                    const HierarchicalLimits& limits = HierarchicalLimits());
  HierarchicalGroup(const HierarchicalGroup&) = delete;
  HierarchicalGroup& operator=(const HierarchicalGroup&) = delete;
  ~HierarchicalGroup() override { leave(); }

  int rank() const override { return mesh_->rank(); }
  int size() const override { return mesh_->size(); }

  void monitored_barrier(const Call& call, bool wait_all_ranks) override;

  /// Allocates from the node's heap.
  std::shared_ptr<void> allocate(size_t bytes) override;
  bool allocates() const override { return node_.allocates(); }
  MemoryUse memory_use() const override { return node_.memory_use(); }
  void abort(const std::string& reason) override;
  void fail(const std::exception_ptr& error) noexcept override;
  void refuse(const Call& call, const std::string& why) noexcept override;
  void leave() noexcept override;
  std::vector<int> node_sizes() const override;
  std::string failure() const override;

 protected:
  void check_usable(const Call& call) override;
  void do_barrier(const Running& run) override;
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void guarded(const Running& run, const std::function<void()>& body) override;

 private:
  /// Only while an operation is under way.
  HierarchicalRun run_of(const Running& run) { return {run, *call_, parts_}; }

  const NodeMap map_;
  const std::shared_ptr<NodeSession> session_;
  const std::shared_ptr<TcpMesh> mesh_;
  NodeGroup node_;
  TcpGroup flat_;  ///< all ranks, for operations that need no node
  NodeWatch watch_;
  const Selection selection_;
  Scratch scratch_;
  const HierarchicalParts parts_;
  std::optional<TcpCall> call_;  ///< while an operation is under way
};

}  // namespace ours
