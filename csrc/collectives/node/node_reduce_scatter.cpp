#include <algorithm>

#include "collectives/node/node_algorithms.h"
#include "common/partition.h"

// reduce_scatter in shared memory: the stage of each rank is divided into one window for each destination. In round k
// all ranks fill window d with piece k of what goes to rank d, synchronise, and reduce the windows that are theirs
// straight into their output. A rank's own part is read where it lies and never staged.

namespace ours::node {

void reduce_scatter(NodeRounds& rounds, const Running& run, const Scattering& job) {
  const auto ranks = static_cast<size_t>(rounds.size());
  const auto me = static_cast<size_t>(rounds.rank());
  const size_t element = size_of(run.call.dtype);
  const size_t window = rounds.chunk_bytes() / ranks / kCacheLine * kCacheLine;
  const size_t per_window = window / element;
  const auto fill = [&](size_t k) {
    std::byte* const to = rounds.next_stage();
    for (size_t d = 0; d < ranks; ++d) {
      const Slice piece = piece_of(job.counts[d], per_window, k);
      if (d == me || piece.empty()) continue;
      const auto* from = static_cast<const std::byte*>(job.inputs[d]) + piece.begin * element;
      rounds.write().copy(to + d * window, from, piece.size() * element);
    }
  };
  Sources sources(rounds.size());
  const auto reduce_own = [&](size_t k) {
    const Slice piece = piece_of(job.counts[me], per_window, k);
    if (piece.empty()) return;
    for (int r = 0; r < rounds.size(); ++r) sources.data()[r] = rounds.stage_of(r) + me * window;
    sources.data()[me] = static_cast<const std::byte*>(job.inputs[me]) + piece.begin * element;
    reduce(static_cast<std::byte*>(job.out) + piece.begin * element, sources.data(), rounds.size(), piece.size(),
           run.call.dtype, job.reduction);
  };

  const size_t count = piece_count(*std::max_element(job.counts.begin(), job.counts.end()), per_window);
  if (run.call.part == Part::Beginning && !repays_no_thread(count, run.record.count * element)) return;
  if (!rounds.has_begun()) {
    rounds.write().begin();
    fill(0);
  }
  if (!rounds.open(run)) return;
  for (size_t k = 0; k < count; ++k) {
    if (k > 0) rounds.sync(run);
    reduce_own(k);
    if (k + 1 < count) fill(k + 1);
  }
}

}  // namespace ours::node
