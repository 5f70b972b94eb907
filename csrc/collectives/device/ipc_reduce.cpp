#include <algorithm>

#include "collectives/device/ipc_group.h"
#include "common/partition.h"

// Reductions through the stages: each rank copies a chunk of its data into its stage. Each driver reduces its
// device's share of the chunk from all ranks' stages into the stage it will be read from, which is that of the driver
// or that of the only reader. The ranks copy the result out of the stage of their device's driver. If each rank has a
// device of its own, that is a reduce-scatter followed by an all-gather.
//
// n chunks take n + 1 synchronisations. After the first one, chunk 0 of all ranks is in its slot. In round k the
// drivers reduce chunk k while the ranks copy chunk k - 1 out and chunk k + 1 in; the synchronisation after it says
// that all of this is done.
//
// Each element is reduced in the order of ranks, wherever the data is cut, so the bits are those of shared memory.

namespace ours {

void IpcGroup::do_reduce(const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype), per_chunk = slot_bytes_ / element;
  const auto chunk_of = [&](size_t k) { return piece_of(job.in.count(), per_chunk, k); };
  const auto copy_in = [&](size_t k) {
    std::byte* const to = slot(rank(), next_slot_ + k);
    job.in.visit(chunk_of(k).begin, chunk_of(k).end,
                 [&](const std::byte* data, size_t at, size_t n) { copy(to + at * element, data, n * element); });
  };
  const auto copy_out = [&](size_t k) {
    if (job.out == nullptr) return;
    const std::byte* const from = slot(job.root < 0 ? driver_of(rank()) : job.root, next_slot_ + k);
    job.out->visit(chunk_of(k).begin, chunk_of(k).end,
                   [&](std::byte* data, size_t at, size_t n) { copy(data, from + at * element, n * element); });
  };
  const auto reduce_chunk = [&](size_t k) {
    const Slice share = share_of(chunk_of(k).size(), element);
    if (share.empty()) return;
    const auto place = [&](int r) { return slot(r, next_slot_ + k) + share.begin * element; };
    std::vector<const void*> sources(static_cast<size_t>(size()));
    std::vector<void*> results;
    for (int r = 0; r < size(); ++r) sources[static_cast<size_t>(r)] = place(r);
    for (const int r : job.root < 0 ? drivers_ : std::vector<int>{job.root}) results.push_back(place(r));
    device().reduce(results, sources, share.size(), run.call.dtype, job.reduction, kernels_->handle());
  };
  const Rounds rounds{std::max<size_t>(piece_count(job.in.count(), per_chunk), 1), copy_in, reduce_chunk, copy_out};

  const Words places = job.out == &job.in ? places_of(job.in, element) : Words{};
  const bool staged = places.empty();
  if (staged) begin_rounds(run, rounds);
  const std::vector<Words> opened =
      open(run, staged ? Words(kPlaceWords + 1) : Words{places.size() / kPlaceWords, places[0], places[1], places[2]});
  const auto in_heap = [](const Words& words) { return words[0] != 0; };
  if (std::all_of(opened.begin(), opened.end(), in_heap)) return reduce_in_heap(run, job, opened, places);
  if (std::any_of(opened.begin(), opened.end(), in_heap)) {
    // Some ranks' data lies in the heap, but not all ranks': these now copy theirs into their stages, too, and
    // synchronise again.
    if (!staged) begin_rounds(run, rounds);
    open(run, {});
  }
  finish_rounds(run, rounds);
}

void IpcGroup::begin_rounds(const Running& run, const Rounds& rounds) {
  rounds.copy_in(0);
  wait_copied(run);
}

void IpcGroup::finish_rounds(const Running& run, const Rounds& rounds) {
  for (size_t k = 0; k < rounds.chunks; ++k) {
    rounds.reduce(k);
    if (k > 0) rounds.copy_out(k - 1);
    if (k + 1 < rounds.chunks) rounds.copy_in(k + 1);
    wait_copied(run);
    wait_reduced(run);
    // All ranks have reduced chunk k, copied chunk k - 1 out and chunk k + 1 in.
    sync(run);
  }
  rounds.copy_out(rounds.chunks - 1);
  wait_copied(run);
  next_slot_ += rounds.chunks;
}

}  // namespace ours
