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

  void barrier(const Call& call) override;
  void all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) override;
  void all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) override;
  void reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction, int root) override;
  void reduce_scatter(const Call& call, const std::vector<const void*>& inputs, const std::vector<size_t>& counts,
                      void* out, const Reduction& reduction) override;
  void broadcast(const Call& call, Span buffer, int root) override;
  void all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) override;
  void gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) override;
  void scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) override;
  void all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) override;
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

 private:
  /// One collective while it is under way on this rank.
  struct Running {
    const Call& call;
    const CallRecord& record;
    TcpCall& tcp;
  };

  /// A reduction of all ranks' `in`, for the reader's or all nodes (-1); `out` is null where it is not wanted.
  struct Reducing {
    const Pieces& in;
    const Pieces* out;
    DType dtype;
    Reduction reduction;
    int reader;
    DType travels;  ///< as what, between nodes
  };

  /// What this rank sends to, and gets from, each rank, as in TcpGroup.
  struct Exchange {
    std::vector<std::optional<ConstSpan>> sends;
    std::vector<std::optional<Span>> receives;
  };

  // The frame of every operation (hierarchical_group.cpp).
  /// Runs body(running); whatever goes wrong becomes the failure of the group, here and elsewhere.
  void collective(const Call& call, const CallRecord& record, const std::function<void(const Running&)>& body,
                  uint64_t fingerprint = 0);
  /// Makes the failure of the mesh that of the node, and the other way round.
  void share_failure() const noexcept;

  /// The node's first synchronisation, in which its ranks' calls are compared, and a later one.
  void open(const Running& run);
  void sync(const Running& run);
  /// After open(): returns once all nodes are known to have made the same call.
  void agree(const Running& run);
  /// The nodes' leaders tell each other that they have come so far.
  void agree_among_leaders(const Running& run, uint32_t first_round);
  /// Moves data over the network until done(), and looks after the node meanwhile. Whether its ranks are still needed:
  /// others may be through with the operation and be gone.
  void wait(const Running& run, const std::function<bool()>& done, bool needs_node = true);
  /// Moves what can be moved at once.
  void push(const Running& run);
  void watch_node(const Running& run);

  void look_around(const std::vector<int>& absent) override;
  std::string culprits(const std::vector<int>& absent) override;
  std::vector<uint32_t> causes_of(const std::vector<int>& absent) const;
  void publish_causes(const TcpCall& tcp);

  // Reductions (hierarchical_all_reduce.cpp).
  void reduce_to(const Running& run, const Reducing& job);
  Algorithm choose(const Reducing& job) const;
  void reduce_short(const Running& run, const Reducing& job, bool doubling);
  /// Among leaders: `sums` holds one a node, this node's is there already.
  void exchange_whole(const Running& run, const Reducing& job, std::byte* sums, std::byte* result);
  /// Among leaders, with as much room behind the sum.
  void exchange_doubling(const Running& run, const Reducing& job, std::byte* sum, std::byte* result);
  void reduce_long(const Running& run, const Reducing& job, bool ring);
  class Stages;
  class Buffers;
  void reduce_staged(const Running& run, Stages& stages, Rail* rail);
  void reduce_in_place(const Running& run, const Reducing& job, const RailSlices& slices, bool in_heap, Rail* rail);
  DType travelling_type(const Reducing& job) const;
  /// Without its memory; null where this rank is on none.
  std::unique_ptr<Rail> make_rail(const Running& run, const Reducing& job, const RailSlices& slices, bool ring);

  // Moving (hierarchical_all_gather.cpp, hierarchical_exchange.cpp).
  void agree_on_sizes(const Running& run, const std::vector<uint64_t>& sizes);
  void exchange_checked(const Call& call, const CallRecord& record, const Exchange& plan);
  void exchange(const Running& run, const Exchange& plan);

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
  int most_local_;            ///< ranks of the largest node
  std::vector<int> leaders_;  ///< of all nodes
  TcpCall* tcp_ = nullptr;    ///< while a collective is under way
  Clock::time_point next_watch_{};
  std::vector<std::byte> scratch_;
};

}  // namespace ours
