#include <algorithm>
#include <functional>

#include "collectives/node/node_algorithms.h"
#include "common/partition.h"
#include "common/process_memory.h"

// reduce_scatter in shared memory: the stage of each rank is divided into one window for each destination. In round k
// all ranks fill window d with piece k of what goes to rank d, synchronise, and reduce the windows that are theirs
// straight into their output. A rank's own part is read where it lies and never staged.
//
// Of large arrays, ranks may read their parts where they lie in the memory of the others instead (see LendChoice). All
// wait for one another in the end then, so that nobody changes what a peer still reads.

namespace ours::node {

namespace {

/// Whether writing the result changes what others read.
bool overwrites_inputs(const Scattering& job, size_t me, size_t element) {
  const std::less<const std::byte*> before;
  const auto* const out = static_cast<const std::byte*>(job.out);
  for (size_t r = 0; r < job.inputs.size(); ++r) {
    const auto* const in = static_cast<const std::byte*>(job.inputs[r]);
    if (r == me || job.counts[r] == 0) continue;
    if (before(in, out + job.counts[me] * element) && before(out, in + job.counts[r] * element)) return true;
  }
  return false;
}

/// Publishes where each rank finds its part of this rank's inputs. Returns false if the others cannot read there.
bool lend(NodeRounds& rounds, const Scattering& job, size_t element) {
  const auto me = static_cast<size_t>(rounds.rank());
  if (!rounds.session().reads_all(rounds.rank()) || overwrites_inputs(job, me, element)) return false;
  ReadableByOthers readable;
  for (size_t r = 0; r < job.inputs.size(); ++r) {
    if (r != me) readable.add(job.inputs[r], job.counts[r] * element);
    rounds.next_addresses()[r] = reinterpret_cast<uint64_t>(job.inputs[r]);
  }
  return readable.all();
}

void reduce_scatter_lent(NodeRounds& rounds, const Running& run, const Scattering& job, size_t element) {
  const auto me = static_cast<size_t>(rounds.rank());
  const auto what = [&run] { return describe_record(run.record); };
  LentReduction reduction(rounds, run, job.reduction);
  reduction.reduce(static_cast<std::byte*>(job.out), static_cast<const std::byte*>(job.inputs[me]), job.counts[me],
                   [&](int from, size_t at, size_t n, std::byte* to) {
                     const uint64_t address = rounds.addresses_of(from)[me] + at * element;
                     rounds.session().read(from, to, address, n * element, what);
                   });
  rounds.sync(run);
}

}  // namespace

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
    const auto* const own = static_cast<const std::byte*>(job.inputs[me]) + piece.begin * element;
    rounds.fill(sources, [&](int r) { return r == rounds.rank() ? own : rounds.stage_of(r) + me * window; });
    reduce(static_cast<std::byte*>(job.out) + piece.begin * element, sources.data(), rounds.size(), piece.size(),
           run.call.dtype, job.reduction);
  };

  const size_t count = piece_count(*std::max_element(job.counts.begin(), job.counts.end()), per_window);
  const size_t bytes = run.record.count * element;
  if (run.call.part == Part::Beginning && !repays_no_thread(count, bytes)) return;
  static_assert(kShort < LendChoice::kLeastReduced, "what has a beginning is never lent");
  LendTiming timing(rounds.scatterings(), bytes, rounds.session());
  const bool lends = timing.lends() && lend(rounds, job, element);
  if (!rounds.has_begun()) {
    rounds.write().begin();
    if (!lends) fill(0);
  }
  if (!rounds.open(run, {0, 0, lends ? 1U : 0U, 0}, timing.arrive())) return;
  timing.go_on(rounds.lend_next());
  const size_t lenders = rounds.exchanged().lenders;
  if (lenders == ranks) {
    reduce_scatter_lent(rounds, run, job, element);
    return timing.end();
  }
  if (lenders > 0) {
    fill(0);
    rounds.sync(run);
  }
  for (size_t k = 0; k < count; ++k) {
    if (k > 0) rounds.sync(run);
    reduce_own(k);
    if (k + 1 < count) fill(k + 1);
  }
  timing.end();
}

}  // namespace ours::node
