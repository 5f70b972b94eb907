#include <algorithm>
#include <cstring>

#include "collectives/node/node_group_impl.h"
#include "common/partition.h"

// reduce_scatter in shared memory: the stage of each rank is divided into one window for each destination. In round k
// all ranks fill window d with piece k of what goes to rank d, synchronise, and reduce the windows that are theirs
// straight into their output. A rank's own part is read where it lies and never staged.

namespace ours {

void NodeGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  reserve_stage();
  write_.begin();
  const Call& call = run.call;
  const std::vector<size_t>& counts = job.counts;
  const auto ranks = static_cast<size_t>(size());
  const size_t element = size_of(call.dtype);
  const size_t window = session_->layout().chunk_bytes / ranks / kCacheLine * kCacheLine;
  const size_t per_window = window / element;
  const size_t most = *std::max_element(counts.begin(), counts.end());
  const size_t rounds = piece_count(most, per_window);

  // The sizes of all parts must agree, not only their sum, and a record has no place for both.
  CallRecord record = run.record;
  if (run.fingerprint != 0) record.count = run.fingerprint;

  const auto fill = [&](size_t k) {
    std::byte* to = stage(rank(), barrier_.next_parity());
    for (size_t d = 0; d < ranks; ++d) {
      const Slice piece = piece_of(counts[d], per_window, k);
      if (d == static_cast<size_t>(rank()) || piece.empty()) continue;
      const auto* from = static_cast<const std::byte*>(job.inputs[d]) + piece.begin * element;
      write_.copy(to + d * window, from, piece.size() * element);
    }
  };

  std::vector<const void*> sources(ranks);
  const auto me = static_cast<size_t>(rank());
  const auto reduce_own = [&](size_t k) {
    const Slice piece = piece_of(counts[me], per_window, k);
    if (piece.empty()) return;
    for (int r = 0; r < size(); ++r) sources[static_cast<size_t>(r)] = stage(r, barrier_.parity()) + me * window;
    sources[me] = static_cast<const std::byte*>(job.inputs[me]) + piece.begin * element;
    ours::reduce(static_cast<std::byte*>(job.out) + piece.begin * element, sources.data(), size(), piece.size(),
                 call.dtype, job.reduction);
  };

  fill(0);
  publish_record(record);
  sync(call, record);
  check_records(record);
  for (size_t k = 0; k < rounds; ++k) {
    if (k > 0) sync(call, record);
    reduce_own(k);
    if (k + 1 < rounds) fill(k + 1);
  }
}

}  // namespace ours
