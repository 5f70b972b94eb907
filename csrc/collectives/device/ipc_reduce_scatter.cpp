#include <algorithm>

#include "collectives/device/ipc_group.h"

// reduce_scatter through the stages, in rounds like those of ipc_reduce.cpp: chunk k has piece k of what goes to each
// rank, one after the other. A device's driver reduces the pieces for that device's ranks into its own stage, and
// these ranks copy them out from there. If ranks that share a device have successive numbers, this takes one kernel
// for each device.

namespace ours {

void IpcGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  const std::vector<size_t>& counts = job.counts;
  const auto ranks = static_cast<size_t>(size());
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
      copy(slot(rank(), next_slot_ + k) + bounds[d] * element,
           static_cast<const std::byte*>(job.inputs[d]) + piece.begin * element, piece.size() * element);
    }
  };
  const auto copy_out = [&](size_t k) {
    const auto me = static_cast<size_t>(rank());
    const Slice piece = piece_of(counts[me], per_piece, k);
    copy(static_cast<std::byte*>(job.out) + piece.begin * element,
         slot(driver_of(rank()), next_slot_ + k) + bounds_of(k)[me] * element, piece.size() * element);
  };
  const auto reduce_chunk = [&](size_t k) {
    if (!drives()) return;
    const std::vector<size_t> bounds = bounds_of(k);
    for (size_t d = 0; d < ranks;) {
      const size_t first = d;
      while (d < ranks && driver_of(static_cast<int>(d)) == rank()) ++d;
      if (bounds[d] > bounds[first]) {
        std::vector<const void*> sources;
        sources.reserve(ranks);
        for (int r = 0; r < size(); ++r) sources.push_back(slot(r, next_slot_ + k) + bounds[first] * element);
        device().reduce({slot(rank(), next_slot_ + k) + bounds[first] * element}, sources, bounds[d] - bounds[first],
                        run.call.dtype, job.reduction, kernels_->handle());
      }
      if (d == first) ++d;
    }
  };

  const Rounds rounds{chunks, copy_in, reduce_chunk, copy_out};
  begin_rounds(run, rounds);
  open(run, {});
  finish_rounds(run, rounds);
}

}  // namespace ours
