#include <cstring>

#include "collectives/hierarchical/hierarchical_algorithms.h"
#include "collectives/partial_sums.h"
#include "collectives/short_reductions.h"
#include "common/error.h"

// Short arrays: every rank writes its input into its stage. After one synchronisation the node's leader reduces all
// stages, and the leaders exchange their sums (short_reductions.h). After a second synchronisation, all ranks read the
// result. An array that does not fit into a stage is reduced to the leader, and sent from it, by collectives of the
// node.

namespace ours::hierarchical {

namespace {

ShortArray array_of(const Reducing& job) {
  return {job.in.count(), job.dtype, between_nodes(job.reduction, job.travels)};
}

/// An exchange among leaders: `sums` has one sum for each node; this node's is already there.
void exchange_whole(HierarchicalRun& run, const Reducing& job, std::byte* sums, std::byte* result) {
  reduce_whole(run.leaders(), array_of(job), sums, result);
}

/// An exchange among leaders; behind the sum there is as much room again.
void exchange_doubling(HierarchicalRun& run, const Reducing& job, std::byte* sum, std::byte* result) {
  const Members leaders = run.leaders();
  const ShortArray array = array_of(job);
  // Calls of other sizes may go other ways, on which their messages do not meet these. If any nodes differ, some node
  // differs from the next one, so each compares with its neighbour.
  if (leaders.size() > 1) run.tcp.agree(0, leaders.rank_at(leaders.place + 1));
  reduce_by_doubling(leaders, array, sum, sum + array.bytes());
  if (leaders.size() > 1) {
    run.wait([&] { return run.tcp.agreed(0, leaders.rank_at(leaders.place + leaders.size() - 1)); });
  }
  if (array.count != 0) std::memcpy(result, sum, array.bytes());
}

/// How leaders exchange their sums, and the leader's memory for that.
struct Exchange {
  void (*run)(HierarchicalRun& run, const Reducing& job, std::byte* sums, std::byte* result);
  size_t held;  ///< sums
  size_t own;   ///< which of them is this node's
};

Exchange exchange_by(Algorithm algorithm, const NodeMap& map) {
  switch (algorithm) {
    case Algorithm::Whole:
      return {exchange_whole, static_cast<size_t>(map.nodes()), static_cast<size_t>(map.here())};
    case Algorithm::Doubling:
      return {exchange_doubling, 2, 0};
    case Algorithm::Direct:
    case Algorithm::Ring:
      break;
  }
  throw Error(std::string(name_of(algorithm)) + " has no exchange among leaders");
}

}  // namespace

void reduce_short(HierarchicalRun& run, const Reducing& job, Algorithm algorithm) {
  const size_t element = job.element();
  const size_t count = job.in.count();
  const size_t bytes = count * element;
  const Exchange exchange = exchange_by(algorithm, run.map);
  // The sums, and then the result.
  std::byte* const sums = run.scratch.take((exchange.held + 1) * bytes);
  std::byte* const own = sums + exchange.own * bytes;
  const Reduction inside = within_node(job.reduction, job.travels);
  const auto give = [&](const std::byte* result) {
    if (job.out != nullptr) job.out->copy_in(0, count, result);
  };

  NodeRounds& rounds = run.rounds;
  if (bytes > rounds.chunk_bytes()) {
    // More than fits into a stage.
    run.open();
    const Pieces sum(own, count, element);
    const Pieces* const to = run.map.is_leader() ? &sum : nullptr;
    run.in_node([&] { run.node.reduce(run.running.call, ours::Reducing{job.in, to, inside, 0}); });
    std::byte* const result = sums + exchange.held * bytes;
    if (run.map.is_leader()) exchange.run(run, job, sums, result);
    run.in_node([&] { run.node.broadcast(run.running.call, Span{result, bytes}, 0); });
    return give(result);
  }

  rounds.copy(job.in, {0, count}, rounds.next_stage(), element);
  run.open();
  if (run.map.is_leader()) {
    Sources stages(rounds.size());
    for (int r = 0; r < rounds.size(); ++r) stages.data()[r] = rounds.stage_of(r);
    if (count != 0) ours::reduce(own, stages.data(), rounds.size(), count, job.dtype, inside);
    exchange.run(run, job, sums, rounds.next_stage());
  }
  run.sync();
  give(rounds.stage_of(0));
}

}  // namespace ours::hierarchical
