#include <algorithm>

#include "collectives/device/device_opening.h"
#include "collectives/device/ipc_group.h"

// Reductions through the stages: each rank copies a chunk of its data into its stage. Each driver reduces a part of
// the chunk from all ranks' stages into the stage it will be read from, and the ranks copy their results out.
//
// n chunks take n + 1 synchronisations. After the first one, chunk 0 of all ranks is in its slot. In round k the
// drivers reduce chunk k while the ranks copy chunk k - 1 out and chunk k + 1 in; the synchronisation after it says
// that all of this is done.
//
// Each element is reduced in the order of ranks, wherever the data is cut, so the bits are those of shared
// memory without domains.

namespace ours {

void IpcGroup::reduce_in_rounds(const Running& run, const Rounds& rounds) {
  rounds.copy_in(0);
  wait_copied(run);
  open_call(host(), run);
  for (size_t k = 0; k < rounds.chunks; ++k) {
    rounds.reduce(k);
    if (k > 0) rounds.copy_out(k - 1);
    if (k + 1 < rounds.chunks) rounds.copy_in(k + 1);
    wait_copied(run);
    wait_reduced(run);
    host().barrier(run.call);
  }
  rounds.copy_out(rounds.chunks - 1);
  wait_copied(run);
  end_call(rounds.chunks);
}

void IpcGroup::reduce_slots(const Running& run, const Reduction& reduction, size_t k, const Slice& elements,
                            const std::vector<int>& to) {
  if (elements.empty()) return;
  const auto place = [&](int r) { return slot(r, k) + elements.begin * size_of(run.call.dtype); };
  std::vector<const void*> sources(static_cast<size_t>(size()));
  std::vector<void*> results(to.size());
  for (int r = 0; r < size(); ++r) sources[static_cast<size_t>(r)] = place(r);
  std::transform(to.begin(), to.end(), results.begin(), place);
  device().reduce(results, sources, elements.size(), run.call.dtype, reduction, kernels_->handle());
}

// Each driver reduces the same share of the chunk into the stages of all drivers, from which the ranks of their devices
// copy all of it; or into the root's. If each rank has a device of its own, that is a reduce-scatter followed by an
// all-gather.
void IpcGroup::do_reduce(const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype), per_chunk = slot_bytes_ / element;
  const size_t chunks = std::max<size_t>(piece_count(job.in.count(), per_chunk), 1);
  const bool for_all = job.root < 0;
  const std::vector<int> readable = for_all ? drivers_ : std::vector<int>{job.root};
  const auto chunk_of = [&](size_t k) { return piece_of(job.in.count(), per_chunk, k); };
  const auto copy_in = [&](size_t k) {
    std::byte* const to = slot(rank(), k);
    job.in.visit(chunk_of(k).begin, chunk_of(k).end,
                 [&](const std::byte* data, size_t at, size_t n) { copy(to + at * element, data, n * element); });
  };
  const auto reduce = [&](size_t k) {
    reduce_slots(run, job.reduction, k, share_of(chunk_of(k).size(), element), readable);
  };
  const auto copy_out = [&](size_t k) {
    if (job.out == nullptr) return;
    const std::byte* const from = slot(for_all ? driver_of(rank()) : job.root, k);
    job.out->visit(chunk_of(k).begin, chunk_of(k).end,
                   [&](std::byte* data, size_t at, size_t n) { copy(data, from + at * element, n * element); });
  };
  reduce_in_rounds(run, {chunks, copy_in, reduce, copy_out});
}

// Chunk k has piece k of what goes to each rank, one after the other. A driver reduces the pieces for the ranks of its
// device into its own stage. If these have successive numbers, that takes one kernel.
void IpcGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  const std::vector<size_t>& counts = job.counts;
  const auto ranks = static_cast<size_t>(size()), me = static_cast<size_t>(rank());
  const size_t element = size_of(run.call.dtype);
  const size_t per_piece = std::max<size_t>(slot_bytes_ / element / ranks, 1);
  const size_t chunks = std::max<size_t>(piece_count(*std::max_element(counts.begin(), counts.end()), per_piece), 1);

  // The bounds of the pieces in chunk k, in elements.
  const auto bounds_of = [&](size_t k) {
    std::vector<size_t> bounds{0};
    for (const size_t count : counts) bounds.push_back(bounds.back() + piece_of(count, per_piece, k).size());
    return bounds;
  };
  const auto copy_in = [&](size_t k) {
    const std::vector<size_t> bounds = bounds_of(k);
    for (size_t d = 0; d < ranks; ++d) {
      const Slice piece = piece_of(counts[d], per_piece, k);
      copy(slot(rank(), k) + bounds[d] * element, static_cast<const std::byte*>(job.inputs[d]) + piece.begin * element,
           piece.size() * element);
    }
  };
  const auto reduce = [&](size_t k) {
    const std::vector<size_t> bounds = bounds_of(k);
    for (size_t first = 0, last = 0; first < ranks; first = last + 1) {
      for (last = first; last < ranks && driver_of(static_cast<int>(last)) == rank();) ++last;
      reduce_slots(run, job.reduction, k, {bounds[first], bounds[last]}, {rank()});
    }
  };
  const auto copy_out = [&](size_t k) {
    const Slice piece = piece_of(counts[me], per_piece, k);
    copy(static_cast<std::byte*>(job.out) + piece.begin * element,
         slot(driver_of(rank()), k) + bounds_of(k)[me] * element, piece.size() * element);
  };
  reduce_in_rounds(run, {chunks, copy_in, reduce, copy_out});
}

}  // namespace ours
