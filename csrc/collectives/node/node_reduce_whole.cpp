#include "collectives/node/node_algorithms.h"

// all_reduce and reduce of small arrays: every rank writes its input into its stage, all synchronise once, and every
// rank reduces all stages for itself. With P ranks that is P times the arithmetic of a divided reduction, but half
// its synchronisations, which is what counts here. The smallest arrays need no stage: they lie beside the record of the
// call.

namespace ours::node {

void reduce_whole(NodeRounds& rounds, const Running& run, const Reducing& job) {
  const DType dtype = run.call.dtype;
  const size_t element = size_of(dtype);
  const size_t bytes = job.in.count() * element;
  const int ranks = rounds.size();
  const bool in_line = bytes <= NodeRounds::kLineBytes;
  if (!rounds.has_begun()) {
    if (bytes >= WriteTimes::kTimedBytes) rounds.write().begin();
    rounds.copy(job.in, {0, job.in.count()}, in_line ? rounds.next_line() : rounds.next_stage(), element);
  }
  if (!rounds.open(run) || job.out == nullptr) return;
  Sources sources(ranks);
  rounds.fill(sources, [&](int r) { return in_line ? rounds.line_of(r) : rounds.stage_of(r); });
  job.out->visit(0, job.out->count(), [&](std::byte* data, size_t, size_t n) {
    reduce(data, sources.data(), ranks, n, dtype, job.reduction);
    for (int i = 0; i < ranks; ++i) sources.data()[i] = static_cast<const std::byte*>(sources.data()[i]) + n * element;
  });
}

}  // namespace ours::node
