#include <algorithm>

#include "collectives/device/device_opening.h"
#include "collectives/device/staging_group.h"
#include "common/partition.h"

// Reductions through the memory of the host. They work on single elements, so they may be cut anywhere. All ranks cut
// alike, since the number of elements must agree; if there is more than one chunk, that is compared first.

namespace ours {

void StagingGroup::do_reduce(const Running& run, const Reducing& asked) {
  const Call& call = run.call;
  const Pieces& in = asked.in;
  const Pieces* const out = asked.out;
  const size_t element = size_of(call.dtype);
  const size_t per_chunk = chunk_bytes_ / element;
  const size_t count = in.count();
  StagingPipeline::Job job = job_of(run);
  job.steps = std::max<size_t>(piece_count(count, per_chunk), 1);
  job.fetch = [&](size_t k, std::byte* slot, StreamHandle down) {
    const Slice chunk = piece_of(count, per_chunk, k);
    in.visit(chunk.begin, chunk.end,
             [&](const std::byte* data, size_t at, size_t n) { copy(slot + at * element, data, n * element, down); });
  };
  job.exchange = [&](size_t k, std::byte* slot) {
    const size_t n = piece_of(count, per_chunk, k).size();
    const Pieces data(slot, n, element);
    host().reduce(call, Reducing{data, out == nullptr ? nullptr : &data, asked.reduction, asked.root});
  };
  job.deliver = [&](size_t k, const std::byte* slot, StreamHandle up) {
    if (out == nullptr) return;
    const Slice chunk = piece_of(count, per_chunk, k);
    out->visit(chunk.begin, chunk.end,
               [&](std::byte* data, size_t at, size_t n) { copy(data, slot + at * element, n * element, up); });
  };
  if (job.steps > 1) open_call(host(), run);
  pipeline_.run(job);
}

void StagingGroup::do_reduce_scatter(const Running& run, const Scattering& asked) {
  const Call& call = run.call;
  const std::vector<size_t>& counts = asked.counts;
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  const size_t element = size_of(call.dtype);
  const size_t per_window = window_bytes() / element;
  const size_t longest = std::min(*std::max_element(counts.begin(), counts.end()), per_window);
  const size_t window = longest * element;

  // In each step, a slot has a window for each rank, followed by the result.
  StagingPipeline::Job job = job_of(run);
  job.steps = std::max<size_t>(piece_count(*std::max_element(counts.begin(), counts.end()), per_window), 1);
  job.fetch = [&](size_t k, std::byte* slot, StreamHandle down) {
    for (size_t d = 0; d < ranks; ++d) {
      const Slice piece = piece_of(counts[d], per_window, k);
      copy(slot + d * window, static_cast<const std::byte*>(asked.inputs[d]) + piece.begin * element,
           piece.size() * element, down);
    }
  };
  job.exchange = [&](size_t k, std::byte* slot) {
    std::vector<const void*> pieces;
    std::vector<size_t> sizes;
    for (size_t d = 0; d < ranks; ++d) {
      pieces.push_back(slot + d * window);
      sizes.push_back(piece_of(counts[d], per_window, k).size());
    }
    host().reduce_scatter(call, pieces, sizes, slot + ranks * window, asked.reduction);
  };
  job.deliver = [&](size_t k, const std::byte* slot, StreamHandle up) {
    const Slice piece = piece_of(counts[me], per_window, k);
    copy(static_cast<std::byte*>(asked.out) + piece.begin * element, slot + ranks * window, piece.size() * element, up);
  };
  if (job.steps > 1) open_call(host(), run);
  pipeline_.run(job);
}

}  // namespace ours
