#include "collectives/node/node_algorithms.h"

// all_reduce and reduce of small arrays at one rank: all write their inputs into their stages, rank 0 reduces them, and
// all read its result. Two synchronisations, and no more arithmetic than needed.

namespace ours::node {

void reduce_star(NodeRounds& rounds, const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype);
  const size_t count = job.in.count();
  rounds.copy(job.in, {0, count}, rounds.next_stage(), element);
  rounds.open(run);
  if (rounds.rank() == 0 && count != 0) {
    Sources sources(rounds.size());
    for (int r = 0; r < rounds.size(); ++r) sources.data()[r] = rounds.stage_of(r);
    reduce(rounds.next_result(), sources.data(), rounds.size(), count, run.call.dtype, job.reduction);
  }
  rounds.sync(run);
  if (job.out != nullptr) job.out->copy_in(0, count, rounds.result_of(0));
}

}  // namespace ours::node
