#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/group.h"
#include "collectives/hierarchical/rail.h"
#include "collectives/node/node_group.h"
#include "collectives/pieces.h"
#include "collectives/select.h"
#include "collectives/tcp/tcp_group.h"
#include "transport/node/node_session.h"
#include "transport/tcp/tcp_call.h"
#include "transport/tcp/tcp_mesh.h"
#include "transport/topology.h"

namespace ours {

/// Collectives of ranks on several nodes: shared memory within a node, TCP between nodes, and no byte twice over the
/// network. Nodes may have different numbers of ranks. The mesh connects all ranks of the group, so that errors name
/// them by their numbers in it; but connections are made only where an algorithm needs them, which is between nodes.
///
/// Each operation begins with a synchronisation within the node, which compares what its ranks called, and goes on with
/// messages between nodes, which compare what the nodes called: so a mismatch is found on all ranks before anything is
/// written. A rank that waits in its node looks after its connections from time to time, and one that waits for the
/// network looks after its node: whatever goes wrong anywhere reaches all.
///
/// The algorithms: hierarchical_all_reduce.cpp (all_reduce, reduce) with hierarchical_stages.cpp,
/// hierarchical_heap_reduce.cpp, doubling.cpp, rail_direct.cpp and rail_ring.cpp, hierarchical_reduce_scatter.cpp,
/// hierarchical_all_gather.cpp, hierarchical_broadcast.cpp, hierarchical_exchange.cpp (gather, scatter, all_to_all).
class HierarchicalGroup final : public Group, private NodeLookout {
 public:
  struct Plan {
    /// How many ranks of a node send large reductions; at most, and by default, the ranks of the smallest node.
    int rails = 0;
    Setting write_around = options().write_around;
  };

  /// `session` is that of this rank's node, in which ranks are numbered as topology.ranks_of() lists them; it must not
  /// be used otherwise. `mesh` connects all ranks. Throws Error where the three do not fit together.
  HierarchicalGroup(Topology topology, std::shared_ptr<NodeSession> session, std::shared_ptr<TcpMesh> mesh, Plan plan);
  HierarchicalGroup(Topology topology, std::shared_ptr<NodeSession> session, std::shared_ptr<TcpMesh> mesh)
      : HierarchicalGroup(std::move(topology), std::move(session), std::move(mesh), Plan()) {}
  HierarchicalGroup(const HierarchicalGroup&) = delete;
  HierarchicalGroup& operator=(const HierarchicalGroup&) = delete;
  ~HierarchicalGroup() override;

  int rank() const override { return mesh_->rank(); }
  int size() const override { return mesh_->size(); }

  void monitored_barrier(const Call& call, bool wait_all_ranks) override;

  /// Of the node's heap.
  std::shared_ptr<void> allocate(size_t bytes) override;
  bool allocates() const override { return node_.allocates(); }
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
  /// An operation while it is under way on this rank.
  struct Stride {
    const Call& call;
    const CallRecord& record;
    TcpCall& tcp;
  };

  /// A reduction of all ranks' `in`, for the reader's or all nodes (-1); `out` is null where it is not wanted.
  struct NodeReducing {
    const Pieces& in;
    const Pieces* out;
    DType dtype;
    Reduction reduction;
    int reader;
    DType travels;  ///< as what, between nodes
  };

  /// Makes the failure of the mesh that of the node, and the other way round.
  void share_failure() const noexcept;

  /// The node's first synchronisation, in which its ranks' calls are compared, and a later one.
  void open(const Stride& run);
  void sync(const Stride& run);
  /// After open(): returns once all nodes are known to have made the same call.
  void agree(const Stride& run);
  /// The nodes' leaders tell each other that they have come so far.
  void agree_among_leaders(const Stride& run, uint32_t first_round);
  /// Moves data over the network until done(), and looks after the node meanwhile. Whether its ranks are still needed:
  /// others may be through with the operation and be gone.
  void wait(const Stride& run, const std::function<bool()>& done, bool needs_node = true);
  /// Moves what can be moved at once.
  void push(const Stride& run);
  void watch_node(const Stride& run);

  void look_around(const std::vector<int>& absent) override;
  std::string culprits(const std::vector<int>& absent) override;
  std::vector<uint32_t> causes_of(const std::vector<int>& absent) const;
  void publish_causes(const TcpCall& tcp);

  Stride stride(const Running& run) { return {run.call, run.record, *tcp_}; }

  // Reductions (hierarchical_all_reduce.cpp).
  void reduce_to(const Stride& run, const NodeReducing& job);
  Algorithm choose(const NodeReducing& job) const;
  void reduce_short(const Stride& run, const NodeReducing& job, bool doubling);
  /// Among leaders: `sums` holds one a node, this node's is there already.
  void exchange_whole(const Stride& run, const NodeReducing& job, std::byte* sums, std::byte* result);
  /// Among leaders, with as much room behind the sum.
  void exchange_doubling(const Stride& run, const NodeReducing& job, std::byte* sum, std::byte* result);
  void reduce_long(const Stride& run, const NodeReducing& job, bool ring);
  class Stages;
  class Buffers;
  void reduce_staged(const Stride& run, Stages& stages, Rail* rail);
  void reduce_in_place(const Stride& run, const NodeReducing& job, const RailSlices& slices, bool in_heap, Rail* rail);
  DType travelling_type(const NodeReducing& job) const;
  /// Without its memory; null where this rank is on none.
  std::unique_ptr<Rail> make_rail(const Stride& run, const NodeReducing& job, const RailSlices& slices, bool ring);

  // Moving (hierarchical_all_gather.cpp, hierarchical_exchange.cpp).
  void agree_on_sizes(const Stride& run, const std::vector<uint64_t>& sizes);
  void all_gather_blocks(const Stride& run, const ExchangePlan& plan);
  void broadcast_batches(const Stride& run, const ExchangePlan& plan);
  void exchange_directly(const Stride& run, const ExchangePlan& plan);

  const std::vector<int>& members() const { return topology_.ranks_of(node_index_); }
  int nodes() const { return topology_.nodes(); }
  bool is_leader() const { return local_ == 0; }
  /// How many bytes go at a time between the network and the node where one operation passes on what another does.
  size_t batch_bytes() const { return 4 * mesh_->plan().chunk_bytes; }
  std::byte* scratch(size_t bytes);
  /// Memory for a rail that nobody else reads.
  void give_scratch(Rail& rail);

  const Topology topology_;
  const std::shared_ptr<NodeSession> session_;
  const std::shared_ptr<TcpMesh> mesh_;
  NodeGroup node_;
  TcpGroup flat_;  ///< of all ranks, for what needs no node
  int node_index_;
  int local_;  ///< this rank's number in its node
  int rails_;
  const Selection selection_;
  int most_local_;              ///< ranks of the largest node
  std::vector<int> leaders_;    ///< of all nodes
  std::optional<TcpCall> tcp_;  ///< while an operation is under way
  Clock::time_point next_watch_{};
  std::vector<std::byte> scratch_;
};

}  // namespace ours
