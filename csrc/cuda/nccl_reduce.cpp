#include <algorithm>

#include "collectives/call_checks.h"
#include "common/partition.h"
#include "cuda/nccl_group.h"

// Reductions: NCCL's where it has them. Otherwise NCCL brings all inputs together, in steps that fit into the scratch
// memory, and the device's kernels reduce them in the order of ranks.

namespace ours::cuda {
namespace {

constexpr size_t kAlign = 16;

const std::byte* at(const void* data, size_t bytes) { return static_cast<const std::byte*>(data) + bytes; }
std::byte* at(void* data, size_t bytes) { return static_cast<std::byte*>(data) + bytes; }

/// Elements of which each of so many slots of the scratch memory has room, a multiple of what kernels read at once.
size_t slot_count(size_t scratch, size_t slots, size_t element) {
  return std::max<size_t>(scratch / slots / kAlign, 1) * kAlign / element;
}

}  // namespace

void NcclGroup::all_reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  run(call, {record_of(call, count, reduction, -1)}, [&] { reduce_to(call, {in, out, count, reduction, -1}); });
}

void NcclGroup::all_reduce(const Call& call, const std::vector<Span>& pieces, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  const size_t element = size_of(call.dtype);
  const Pieces data(pieces, element);
  run(call, {record_of(call, data.count(), reduction, -1)}, [&] {
    // Peers may have cut it elsewhere, or not at all: all reduce in the same steps.
    const size_t step = slot_count(scratch_bytes_, 1, element);
    auto* const whole = static_cast<std::byte*>(data.whole());
    for (size_t k = 0; k < piece_count(data.count(), step); ++k) {
      const Slice part = piece_of(data.count(), step, k);
      std::byte* const place = whole != nullptr ? whole + part.begin * element : joined();
      if (whole != nullptr) {
        reduce_to(call, {place, place, part.size(), reduction, -1});
        continue;
      }
      scratch(call);  // which must not be captured either
      data.visit(part.begin, part.end,
                 [&](std::byte* piece, size_t from, size_t n) { copy(at(place, from * element), piece, n * element); });
      reduce_to(call, {place, place, part.size(), reduction, -1});
      data.visit(part.begin, part.end,
                 [&](std::byte* piece, size_t from, size_t n) { copy(piece, at(place, from * element), n * element); });
    }
  });
}

void NcclGroup::reduce(const Call& call, const void* in, void* out, size_t count, const Reduction& reduction,
                       int root) {
  check_supported(reduction.kind, call.dtype);
  check_root(root, size());
  run(call, {record_of(call, count, reduction, root)}, [&] { reduce_to(call, {in, out, count, reduction, root}); });
}

void NcclGroup::reduce_to(const Call& call, const Reducing& job) {
  if (job.count == 0) return;
  const auto how = nccl_reduction_of(call.dtype, job.reduction, size());
  if (how) {
    reduce_by_nccl(call, job, *how);
  } else {
    reduce_gathered(call, job);
  }
}

void NcclGroup::reduce_by_nccl(const Call& call, const Reducing& job, const NcclReduction& how) {
  const size_t element = size_of(call.dtype);
  const bool mine = job.root < 0 || job.root == rank();
  const size_t step = how.prepare ? slot_count(scratch_bytes_, 1, element) : job.count;
  for (size_t k = 0; k < piece_count(job.count, step); ++k) {
    const Slice part = piece_of(job.count, step, k);
    const void* in = at(job.in, part.begin * element);
    void* out = mine ? at(job.out, part.begin * element) : nullptr;
    if (how.prepare) {
      prepare(scratch(call), in, part.size(), call.dtype, *how.prepare);
      in = scratch(call);
    }
    give(call, [&] {
      const size_t units = part.size() * how.units;
      if (job.root < 0) {
        api_->all_reduce(in, out, units, how.type, how.op, at_);
      } else {
        api_->reduce(in, out, units, how.type, how.op, job.root, at_);
      }
    });
    if (how.finish && mine) prepare(out, out, part.size(), call.dtype, *how.finish);
  }
}

void NcclGroup::prepare(void* to, const void* from, size_t count, DType dtype, const Reduction& reduction) {
  if (count != 0) device().reduce({to}, {from}, count, dtype, reduction, stream());
}

void NcclGroup::reduce_gathered(const Call& call, const Reducing& job) {
  const size_t element = size_of(call.dtype);
  const size_t step = slot_count(scratch_bytes_, static_cast<size_t>(size()), element);
  for (size_t k = 0; k < piece_count(job.count, step); ++k) {
    const Slice part = piece_of(job.count, step, k);
    const void* in = at(job.in, part.begin * element);
    give(call, [&] { api_->all_gather(in, scratch(call), part.size() * element, at_); });
    if (job.root >= 0 && job.root != rank()) continue;
    fold(at(job.out, part.begin * element), part.size(), part.size() * element, call, job.reduction);
  }
}

/// Reduces `count` elements of each rank, which lie `stride` bytes apart in the scratch memory. More sources than the
/// device takes are reduced into the first one of the next lot.
void NcclGroup::fold(void* result, size_t count, size_t stride, const Call& call, const Reduction& reduction) {
  if (count == 0) return;
  const auto ranks = static_cast<size_t>(size());
  Reduction partial = reduction;
  if (partial.kind == ReduceKind::Avg) partial.kind = ReduceKind::Sum;
  Reduction last = reduction;
  if (reduction.kind == ReduceKind::PremulSum && size() > kMostDeviceRanks) {
    // Each but once, whatever lots it goes through.
    for (size_t r = 0; r < ranks; ++r) {
      prepare(scratch(call) + r * stride, scratch(call) + r * stride, count, call.dtype, reduction);
    }
    partial.kind = last.kind = ReduceKind::Sum;
  }
  std::vector<const void*> sources;
  for (size_t r = 0; r < ranks; ++r) {
    sources.push_back(scratch(call) + r * stride);
    if (sources.size() == kMostDeviceRanks && r + 1 < ranks) {
      device().reduce({scratch(call)}, sources, count, call.dtype, partial, stream());
      sources = {scratch(call)};
    }
  }
  device().reduce({result}, sources, count, call.dtype, last, stream());
}

void NcclGroup::reduce_scatter(const Call& call, const std::vector<const void*>& inputs,
                               const std::vector<size_t>& counts, void* out, const Reduction& reduction) {
  check_supported(reduction.kind, call.dtype);
  check_reduce_scatter(inputs, counts, size());
  CallRecord record = record_of(call, 0, reduction, -1);
  for (const size_t count : counts) record.count += count;
  run(call, {record, {}, fingerprint_of(counts)}, [&] {
    const auto how = nccl_reduction_of(call.dtype, reduction, size());
    if (how && !how->prepare) {
      scatter_by_nccl(call, inputs, counts, out, *how);
    } else {
      scatter_exchanged(call, inputs, counts, out, reduction);
    }
  });
}

void NcclGroup::scatter_by_nccl(const Call& call, const std::vector<const void*>& inputs,
                                const std::vector<size_t>& counts, void* out, const NcclReduction& how) {
  const size_t mine = counts[static_cast<size_t>(rank())];
  // Of a single tensor, in equal parts on all ranks. Where lists lie, each rank knows for itself alone.
  if (call.op == Op::ReduceScatterSingle) {
    if (mine == 0) return;
    give(call, [&] { api_->reduce_scatter(inputs[0], out, mine * how.units, how.type, how.op, at_); });
  } else {
    give_group(call, [&] {
      for (int root = 0; root < size(); ++root) {
        const auto r = static_cast<size_t>(root);
        void* to = root == rank() ? out : nullptr;
        if (counts[r] != 0) api_->reduce(inputs[r], to, counts[r] * how.units, how.type, how.op, root, at_);
      }
    });
  }
  if (how.finish) prepare(out, out, mine, call.dtype, *how.finish);
}

void NcclGroup::scatter_exchanged(const Call& call, const std::vector<const void*>& inputs,
                                  const std::vector<size_t>& counts, void* out, const Reduction& reduction) {
  const size_t element = size_of(call.dtype);
  const size_t step = slot_count(scratch_bytes_, static_cast<size_t>(size()), element);
  const size_t mine = counts[static_cast<size_t>(rank())];
  const size_t rounds = piece_count(*std::max_element(counts.begin(), counts.end()), step);
  for (size_t k = 0; k < rounds; ++k) {
    const Slice part = piece_of(mine, step, k);
    const size_t stride = part.size() * element;
    give_group(call, [&] {
      for (int peer = 0; peer < size(); ++peer) {
        const auto p = static_cast<size_t>(peer);
        const Slice theirs = piece_of(counts[p], step, k);
        if (!theirs.empty()) {
          api_->send(at(inputs[p], theirs.begin * element), theirs.size() * element, peer, at_);
        }
        if (!part.empty()) api_->receive(scratch(call) + p * stride, stride, peer, at_);
      }
    });
    if (!part.empty()) fold(at(out, part.begin * element), part.size(), stride, call, reduction);
  }
}

}  // namespace ours::cuda
