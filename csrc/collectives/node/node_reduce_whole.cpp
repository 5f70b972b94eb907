#include "collectives/node/node_algorithms.h"

// all_reduce and reduce of small arrays: every rank writes its input into its stage, all synchronise once, and every
// rank reduces all stages for itself. With P ranks that is P times the arithmetic of a divided reduction, but half
// its synchronisations, which is what counts here. The smallest arrays need no stage: they lie beside the counter
// that the synchronisation polls.

namespace ours::node {

namespace {

bool fits_line(const Running& run, const Reducing& job) {
  return job.in.count() * size_of(run.call.dtype) <= NodeRounds::kLineBytes;
}

}  // namespace

void begin_reduce_whole(NodeRounds& rounds, const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype);
  if (job.in.count() * element >= WriteTimes::kTimedBytes) rounds.write().begin();
  std::byte* const to = fits_line(run, job) ? rounds.next_line() : rounds.next_stage();
  rounds.copy(job.in, {0, job.in.count()}, to, element);
  rounds.begin(run);
}

void reduce_whole(NodeRounds& rounds, const Running& run, const Reducing& job) {
  if (!rounds.has_begun()) begin_reduce_whole(rounds, run, job);
  rounds.open(run);
  if (job.out == nullptr) return;
  const DType dtype = run.call.dtype;
  const size_t element = size_of(dtype);
  const int ranks = rounds.size();
  const bool in_line = fits_line(run, job);
  Sources sources(ranks);
  for (int r = 0; r < ranks; ++r) sources.data()[r] = in_line ? rounds.line_of(r) : rounds.stage_of(r);
  job.out->visit(0, job.out->count(), [&](std::byte* data, size_t, size_t n) {
    reduce(data, sources.data(), ranks, n, dtype, job.reduction);
    for (int r = 0; r < ranks; ++r) sources.data()[r] = static_cast<const std::byte*>(sources.data()[r]) + n * element;
  });
}

}  // namespace ours::node
