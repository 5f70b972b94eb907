#include <algorithm>

#include "collectives/call_checks.h"
#include "collectives/device/device_opening.h"
#include "collectives/device/staging_group.h"
#include "common/partition.h"

// Reductions through the memory of the host. They are of single elements, so they may be cut anywhere: all ranks cut
// alike, since the number of elements must agree, which is compared first where there is more than one chunk.

namespace ours {

void StagingGroup::all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const size_t element = size_of(call.dtype);
  const Pieces from(const_cast<void*>(in), count, element);
  const Pieces to(out, count, element);
  guarded(call, [&] { reduce_to(call, record_of(call, count, reduction, -1), from, &to, reduction, -1); });
}

void StagingGroup::all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const Pieces data(pieces, size_of(call.dtype));
  guarded(call, [&] { reduce_to(call, record_of(call, data.count(), reduction, -1), data, &data, reduction, -1); });
}

void StagingGroup::reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction,
                          int root) {
  check_supported(reduction.kind, call.dtype);
  check_root(root, size());
  const size_t element = size_of(call.dtype);
  const Pieces from(const_cast<void*>(in), count, element);
  const Pieces to(out, count, element);
  guarded(call, [&] {
    reduce_to(call, record_of(call, count, reduction, root), from, rank() == root ? &to : nullptr, reduction, root);
  });
}

void StagingGroup::reduce_to(const Call& call, const CallRecord& record, const Pieces& in, const Pieces* out,
                             const Reduction& reduction, int root) {
  const size_t element = size_of(call.dtype);
  const size_t per_chunk = chunk_bytes_ / element;
  const size_t count = in.count();
  StagingPipeline::Job job = job_of(call, record);
  job.steps = std::max<size_t>(piece_count(count, per_chunk), 1);
  job.fetch = [&](size_t k, std::byte* slot, StreamHandle down) {
    const Slice chunk = piece_of(count, per_chunk, k);
    in.visit(chunk.begin, chunk.end,
             [&](const std::byte* data, size_t at, size_t n) { copy(slot + at * element, data, n * element, down); });
  };
  job.exchange = [&](size_t k, std::byte* slot) {
    const size_t n = piece_of(count, per_chunk, k).size();
    if (root < 0) {
      host().all_reduce(call, slot, slot, n, reduction);
    } else {
      host().reduce(call, slot, slot, n, reduction, root);
    }
  };
  job.deliver = [&](size_t k, const std::byte* slot, StreamHandle up) {
    if (out == nullptr) return;
    const Slice chunk = piece_of(count, per_chunk, k);
    out->visit(chunk.begin, chunk.end,
               [&](std::byte* data, size_t at, size_t n) { copy(data, slot + at * element, n * element, up); });
  };
  if (job.steps > 1) open_call(host(), call, record);
  pipeline_.run(job);
}

void StagingGroup::reduce_scatter(const Call& call, const std::vector<const void*>& inputs,
                                  const std::vector<size_t>& counts, void* out, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  check_reduce_scatter(inputs, counts, size());
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  const size_t element = size_of(call.dtype);
  const size_t per_window = window_bytes() / element;
  const bool even = std::all_of(counts.begin(), counts.end(), [&](size_t n) { return n == counts[0]; });
  const uint64_t fingerprint = fingerprint_of(counts);
  const CallRecord record = record_of(call, even ? counts[0] * ranks : fingerprint, reduction, -1);
  const size_t longest = std::min(*std::max_element(counts.begin(), counts.end()), per_window);
  const size_t window = longest * element;

  // In each step a slot has a window for each rank, and the result behind them.
  StagingPipeline::Job job = job_of(call, record);
  job.steps = std::max<size_t>(piece_count(*std::max_element(counts.begin(), counts.end()), per_window), 1);
  job.fetch = [&](size_t k, std::byte* slot, StreamHandle down) {
    for (size_t d = 0; d < ranks; ++d) {
      const Slice piece = piece_of(counts[d], per_window, k);
      copy(slot + d * window, static_cast<const std::byte*>(inputs[d]) + piece.begin * element, piece.size() * element,
           down);
    }
  };
  job.exchange = [&](size_t k, std::byte* slot) {
    std::vector<const void*> pieces;
    std::vector<size_t> sizes;
    for (size_t d = 0; d < ranks; ++d) {
      pieces.push_back(slot + d * window);
      sizes.push_back(piece_of(counts[d], per_window, k).size());
    }
    host().reduce_scatter(call, pieces, sizes, slot + ranks * window, reduction);
  };
  job.deliver = [&](size_t k, const std::byte* slot, StreamHandle up) {
    const Slice piece = piece_of(counts[me], per_window, k);
    copy(static_cast<std::byte*>(out) + piece.begin * element, slot + ranks * window, piece.size() * element, up);
  };
  guarded(call, [&] {
    if (job.steps > 1) open_call(host(), call, record, {}, fingerprint);
    pipeline_.run(job);
  });
}

}  // namespace ours
