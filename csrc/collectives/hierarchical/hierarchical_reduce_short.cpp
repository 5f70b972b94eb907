#include <algorithm>
#include <cstring>

#include "collectives/doubling.h"
#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/partial_sums.h"

// Short arrays: every rank writes its input into its stage. After one synchronisation the node's leader reduces all
// stages, sends the sum to all other leaders and reduces theirs; if nodes are many, leaders exchange their sums by
// recursive doubling (doubling.h). After a second synchronisation, all ranks read the result. That takes the time of
// one message, or of log2(nodes), and two synchronisations of the node. An array that does not fit into a stage is
// reduced to the leader, and sent from it, by collectives of the node.

namespace ours::hierarchical {

namespace {

/// An exchange among leaders: `sums` has one sum for each node; this node's is already there.
void exchange_whole(HierarchicalRun& run, const Reducing& job, std::byte* sums, std::byte* result) {
  const size_t count = job.in.count();
  const size_t bytes = count * job.element();
  const std::vector<int>& leaders = run.map.leaders();
  const size_t nodes = leaders.size();
  const auto here = static_cast<size_t>(run.map.here());
  size_t sent = 0, received = 0;
  for (size_t i = 1; i < nodes; ++i) {
    run.tcp.send({leaders[(here + i) % nodes], 0, bytes}, sums + here * bytes, &sent);
  }
  for (size_t i = 1; i < nodes; ++i) {
    const size_t from = (here + nodes - i) % nodes;
    run.tcp.receive({leaders[from], 0, bytes}, sums + from * bytes, &received);
  }
  const size_t all = (nodes - 1) * run.tcp.parts(bytes);
  run.wait([&] { return sent == all && received == all; });
  Sources sources(run.map.nodes());
  for (size_t node = 0; node < nodes; ++node) sources.data()[node] = sums + node * bytes;
  if (count == 0) return;
  ours::reduce(result, sources.data(), run.map.nodes(), count, job.dtype, between_nodes(job.reduction, job.travels));
}

/// An exchange among leaders; behind the sum there is as much room again.
void exchange_doubling(HierarchicalRun& run, const Reducing& job, std::byte* sum, std::byte* result) {
  const size_t count = job.in.count();
  const size_t bytes = count * job.element();
  const std::vector<int>& leaders = run.map.leaders();
  const size_t nodes = leaders.size();
  const auto here = static_cast<size_t>(run.map.here());
  // Calls of other sizes may go other ways, on which their messages do not meet these. If any nodes differ, some node
  // differs from the next one, so each compares with its neighbour.
  if (nodes > 1) run.tcp.agree(0, leaders[(here + 1) % nodes]);
  Doubling(run.tcp, leaders, run.map.here())
      .reduce(sum, sum + bytes, count, job.dtype, between_nodes(job.reduction, job.travels),
              [&](const std::function<bool()>& done) { run.wait(done); });
  if (nodes > 1) run.wait([&] { return run.tcp.agreed(0, leaders[(here + nodes - 1) % nodes]); });
  if (bytes != 0) std::memcpy(result, sum, bytes);
}

}  // namespace

void reduce_short(HierarchicalRun& run, const Reducing& job, bool doubling) {
  const size_t element = job.element();
  const size_t count = job.in.count();
  const size_t bytes = count * element;
  // The leader's memory: the sums of all nodes; or its own and another's, and then the result.
  const size_t held = doubling ? 2 : static_cast<size_t>(run.map.nodes());
  std::byte* const sums = run.scratch.take((held + 1) * bytes);
  std::byte* const own = doubling ? sums : sums + static_cast<size_t>(run.map.here()) * bytes;
  const Reduction inside = within_node(job.reduction, job.travels);
  const auto exchange = [&](std::byte* result) {
    (doubling ? exchange_doubling : exchange_whole)(run, job, sums, result);
  };
  const auto give = [&](const std::byte* result) {
    if (job.out == nullptr) return;
    job.out->visit(
        0, count, [&](std::byte* data, size_t at, size_t n) { std::memcpy(data, result + at * element, n * element); });
  };

  NodeRounds& rounds = run.rounds;
  if (bytes > rounds.chunk_bytes()) {
    // More than fits into a stage.
    run.open();
    const Pieces sum(own, count, element);
    const Pieces* const to = run.map.is_leader() ? &sum : nullptr;
    run.in_node([&] { run.node.reduce(run.running.call, ours::Reducing{job.in, to, inside, 0}); });
    std::byte* const result = sums + held * bytes;
    if (run.map.is_leader()) exchange(result);
    run.in_node([&] { run.node.broadcast(run.running.call, Span{result, bytes}, 0); });
    return give(result);
  }

  rounds.copy(job.in, {0, count}, rounds.next_stage(), element);
  run.open();
  if (run.map.is_leader()) {
    Sources stages(rounds.size());
    for (int r = 0; r < rounds.size(); ++r) stages.data()[r] = rounds.stage_of(r);
    if (count != 0) ours::reduce(own, stages.data(), rounds.size(), count, job.dtype, inside);
    exchange(rounds.next_stage());
  }
  run.sync();
  give(rounds.stage_of(0));
}

}  // namespace ours::hierarchical
