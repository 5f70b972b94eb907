#include <algorithm>

#include "common/partition.h"
#include "cuda/nccl_group.h"

// Uses NCCL's reductions where it has them. Otherwise NCCL brings all inputs together, in steps that fit into the
// scratch memory, and the device's kernels reduce them in the order of ranks.

namespace ours::cuda {
namespace {

constexpr size_t kAlign = 16;

const std::byte* at(const void* data, size_t bytes) { return static_cast<const std::byte*>(data) + bytes; }
std::byte* at(void* data, size_t bytes) { return static_cast<std::byte*>(data) + bytes; }

/// The number of elements for which each of `slots` slots of the scratch memory has room, a multiple of what kernels
/// read at once.
size_t slot_count(size_t scratch, size_t slots, size_t element) {
  return std::max<size_t>(scratch / slots / kAlign, 1) * kAlign / element;
}

}  // namespace

void NcclGroup::do_reduce(const Running& run, const Reducing& job) {
  claim(run);
  const Pieces& data = job.in;
  const size_t element = size_of(run.call.dtype);
  // Only the rank itself knows where its array is cut, so all ranks reduce in steps that fit into the scratch memory.
  const size_t step = job.root < 0 ? slot_count(scratch_bytes_, 1, element) : std::max<size_t>(data.count(), 1);
  for (size_t k = 0; k < piece_count(data.count(), step); ++k) {
    const Slice part = piece_of(data.count(), step, k);
    if (data.whole() == nullptr) {
      reduce_joined(run, job, part);
      continue;
    }
    const std::byte* const in = data.whole() + part.begin * element;
    std::byte* const out = job.out == nullptr ? nullptr : job.out->whole() + part.begin * element;
    reduce_to(run, {in, out, part.size(), job.reduction, job.root});
  }
}

/// Reduces data that lies in several places, in place.
void NcclGroup::reduce_joined(const Running& run, const Reducing& job, Slice part) {
  refuse_capture(run);
  const size_t element = size_of(run.call.dtype);
  job.in.visit(part.begin, part.end, [&](std::byte* piece, size_t from, size_t n) {
    copy(at(joined(), from * element), piece, n * element);
  });
  reduce_to(run, {joined(), joined(), part.size(), job.reduction, -1});
  job.in.visit(part.begin, part.end, [&](std::byte* piece, size_t from, size_t n) {
    copy(piece, at(joined(), from * element), n * element);
  });
}

void NcclGroup::reduce_to(const Running& run, const Whole& job) {
  if (job.count == 0) return;
  const auto how = nccl_reduction_of(run.call.dtype, job.reduction, size());
  if (how) {
    reduce_by_nccl(run, job, *how);
  } else {
    reduce_gathered(run, job);
  }
}

void NcclGroup::reduce_by_nccl(const Running& run, const Whole& job, const NcclReduction& how) {
  const size_t element = size_of(run.call.dtype);
  const bool mine = job.root < 0 || job.root == rank();
  const size_t step = how.prepare ? slot_count(scratch_bytes_, 1, element) : job.count;
  for (size_t k = 0; k < piece_count(job.count, step); ++k) {
    const Slice part = piece_of(job.count, step, k);
    const void* in = at(job.in, part.begin * element);
    void* out = mine ? at(job.out, part.begin * element) : nullptr;
    if (how.prepare) {
      refuse_capture(run);
      prepare(scratch(), in, part.size(), run.call.dtype, *how.prepare);
      in = scratch();
    }
    give(run, [&] {
      const size_t units = part.size() * how.units;
      if (job.root < 0) {
        api_->all_reduce(in, out, units, how.type, how.op, at_);
      } else {
        api_->reduce(in, out, units, how.type, how.op, job.root, at_);
      }
    });
    if (how.finish && mine) prepare(out, out, part.size(), run.call.dtype, *how.finish);
  }
}

void NcclGroup::prepare(void* to, const void* from, size_t count, DType dtype, const Reduction& reduction) {
  if (count != 0) device().reduce({to}, {from}, count, dtype, reduction, stream());
}

void NcclGroup::reduce_gathered(const Running& run, const Whole& job) {
  const size_t element = size_of(run.call.dtype);
  refuse_capture(run);
  const size_t step = slot_count(scratch_bytes_, static_cast<size_t>(size()), element);
  for (size_t k = 0; k < piece_count(job.count, step); ++k) {
    const Slice part = piece_of(job.count, step, k);
    const void* in = at(job.in, part.begin * element);
    give(run, [&] { api_->all_gather(in, scratch(), part.size() * element, at_); });
    if (job.root >= 0 && job.root != rank()) continue;
    fold(at(job.out, part.begin * element), part.size(), part.size() * element, run, job.reduction);
  }
}

/// Reduces `count` elements of each rank, which lie `stride` bytes apart in the scratch memory. If there are more
/// sources than the device takes, the result of one batch becomes the first source of the next.
void NcclGroup::fold(void* result, size_t count, size_t stride, const Running& run, const Reduction& reduction) {
  if (count == 0) return;
  const auto ranks = static_cast<size_t>(size());
  Reduction partial = reduction;
  if (partial.kind == ReduceKind::Avg) partial.kind = ReduceKind::Sum;
  Reduction last = reduction;
  if (reduction.kind == ReduceKind::PremulSum && size() > kMostDeviceRanks) {
    // Each source is multiplied only once, however many batches it goes through.
    for (size_t r = 0; r < ranks; ++r) {
      prepare(scratch() + r * stride, scratch() + r * stride, count, run.call.dtype, reduction);
    }
    partial.kind = last.kind = ReduceKind::Sum;
  }
  std::vector<const void*> sources;
  for (size_t r = 0; r < ranks; ++r) {
    sources.push_back(scratch() + r * stride);
    if (sources.size() == kMostDeviceRanks && r + 1 < ranks) {
      device().reduce({scratch()}, sources, count, run.call.dtype, partial, stream());
      sources = {scratch()};
    }
  }
  device().reduce({result}, sources, count, run.call.dtype, last, stream());
}

void NcclGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  claim(run);
  const auto how = nccl_reduction_of(run.call.dtype, job.reduction, size());
  if (how && !how->prepare) {
    scatter_by_nccl(run, job, *how);
  } else {
    scatter_exchanged(run, job);
  }
}

void NcclGroup::scatter_by_nccl(const Running& run, const Scattering& job, const NcclReduction& how) {
  const size_t mine = job.counts[static_cast<size_t>(rank())];
  if (run.call.op == Op::ReduceScatterSingle) {  // all inputs are parts of one tensor, of the same size
    if (mine == 0) return;
    give(run, [&] { api_->reduce_scatter(job.inputs[0], job.out, mine * how.units, how.type, how.op, at_); });
  } else {
    give_group(run, [&] {
      for (int root = 0; root < size(); ++root) {
        const auto r = static_cast<size_t>(root);
        void* to = root == rank() ? job.out : nullptr;
        if (job.counts[r] == 0) continue;
        api_->reduce(job.inputs[r], to, job.counts[r] * how.units, how.type, how.op, root, at_);
      }
    });
  }
  if (how.finish) prepare(job.out, job.out, mine, run.call.dtype, *how.finish);
}

void NcclGroup::scatter_exchanged(const Running& run, const Scattering& job) {
  const std::vector<const void*>& inputs = job.inputs;
  const std::vector<size_t>& counts = job.counts;
  const size_t element = size_of(run.call.dtype);
  refuse_capture(run);
  const size_t step = slot_count(scratch_bytes_, static_cast<size_t>(size()), element);
  const size_t mine = counts[static_cast<size_t>(rank())];
  const size_t rounds = piece_count(*std::max_element(counts.begin(), counts.end()), step);
  for (size_t k = 0; k < rounds; ++k) {
    const Slice part = piece_of(mine, step, k);
    const size_t stride = part.size() * element;
    give_group(run, [&] {
      for (int peer = 0; peer < size(); ++peer) {
        const auto p = static_cast<size_t>(peer);
        const Slice theirs = piece_of(counts[p], step, k);
        if (!theirs.empty()) {
          api_->send(at(inputs[p], theirs.begin * element), theirs.size() * element, peer, at_);
        }
        if (!part.empty()) api_->receive(scratch() + p * stride, stride, peer, at_);
      }
    });
    if (!part.empty()) fold(at(job.out, part.begin * element), part.size(), stride, run, job.reduction);
  }
}

}  // namespace ours::cuda
