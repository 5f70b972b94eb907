#include <algorithm>

#include "common/partition.h"
#include "cuda/nccl_group.h"

// Reductions: NCCL's where it has them. Else all inputs are brought together by it, in steps that fit into the scratch
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

void NcclGroup::do_reduce(const Running& run, const Reducing& job) {
  const size_t element = size_of(run.call.dtype);
  const Pieces& data = job.in;
  // Peers may have cut it elsewhere: who has one piece reduces in the same steps.
  const auto opened = open_call(host(), run, {data.whole() != nullptr ? 1u : 0u});
  if (std::all_of(opened.begin(), opened.end(), [](const Words& words) { return words[0] == 1; })) {
    return reduce_to(
        run, {data.whole(), job.out == nullptr ? nullptr : job.out->whole(), data.count(), job.reduction, job.root});
  }
  const size_t step = slot_count(scratch_bytes_, 1, element);
  for (size_t k = 0; k < piece_count(data.count(), step); ++k) {
    const Slice part = piece_of(data.count(), step, k);
    data.visit(part.begin, part.end, [&](std::byte* piece, size_t from, size_t n) {
      copy(at(joined(), from * element), piece, n * element);
    });
    reduce_to(run, {joined(), joined(), part.size(), job.reduction, -1});
    data.visit(part.begin, part.end, [&](std::byte* piece, size_t from, size_t n) {
      copy(piece, at(joined(), from * element), n * element);
    });
  }
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
  if (count != 0) device().reduce({to}, {from}, count, dtype, reduction, stream_->handle());
}

void NcclGroup::reduce_gathered(const Running& run, const Whole& job) {
  const size_t element = size_of(run.call.dtype);
  const size_t step = slot_count(scratch_bytes_, static_cast<size_t>(size()), element);
  for (size_t k = 0; k < piece_count(job.count, step); ++k) {
    const Slice part = piece_of(job.count, step, k);
    const void* in = at(job.in, part.begin * element);
    give(run, [&] { api_->all_gather(in, scratch(), part.size() * element, at_); });
    if (job.root >= 0 && job.root != rank()) continue;
    fold(at(job.out, part.begin * element), part.size(), part.size() * element, run, job.reduction);
  }
}

/// Reduces `count` elements of each rank, which lie `stride` bytes apart in the scratch memory. More sources than the
/// device takes are reduced into the first one of the next lot.
void NcclGroup::fold(void* result, size_t count, size_t stride, const Running& run, const Reduction& reduction) {
  if (count == 0) return;
  const auto ranks = static_cast<size_t>(size());
  Reduction partial = reduction;
  if (partial.kind == ReduceKind::Avg) partial.kind = ReduceKind::Sum;
  Reduction last = reduction;
  if (reduction.kind == ReduceKind::PremulSum && size() > kMostDeviceRanks) {
    // Each but once, whatever lots it goes through.
    for (size_t r = 0; r < ranks; ++r) {
      prepare(scratch() + r * stride, scratch() + r * stride, count, run.call.dtype, reduction);
    }
    partial.kind = last.kind = ReduceKind::Sum;
  }
  std::vector<const void*> sources;
  for (size_t r = 0; r < ranks; ++r) {
    sources.push_back(scratch() + r * stride);
    if (sources.size() == kMostDeviceRanks && r + 1 < ranks) {
      device().reduce({scratch()}, sources, count, run.call.dtype, partial, stream_->handle());
      sources = {scratch()};
    }
  }
  device().reduce({result}, sources, count, run.call.dtype, last, stream_->handle());
}

void NcclGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  const std::vector<const void*>& inputs = job.inputs;
  const std::vector<size_t>& counts = job.counts;
  const size_t element = size_of(run.call.dtype);
  bool in_one_piece = true;
  for (size_t r = 1; r < inputs.size(); ++r) {
    in_one_piece = in_one_piece && counts[r] == counts[0] && inputs[r] == at(inputs[0], r * counts[0] * element);
  }
  const auto opened = open_call(host(), run, {in_one_piece ? 1u : 0u});
  const bool all = std::all_of(opened.begin(), opened.end(), [](const Words& words) { return words[0] == 1; });
  const auto how = nccl_reduction_of(run.call.dtype, job.reduction, size());
  if (how && !how->prepare) {
    scatter_by_nccl(run, job, *how, all);
  } else {
    scatter_exchanged(run, job);
  }
}

void NcclGroup::scatter_by_nccl(const Running& run, const Scattering& job, const NcclReduction& how,
                                bool in_one_piece) {
  const std::vector<const void*>& inputs = job.inputs;
  const std::vector<size_t>& counts = job.counts;
  void* const out = job.out;
  const size_t mine = counts[static_cast<size_t>(rank())];
  if (in_one_piece) {
    if (mine == 0) return;
    give(run, [&] { api_->reduce_scatter(inputs[0], out, mine * how.units, how.type, how.op, at_); });
  } else {
    give_group(run, [&] {
      for (int root = 0; root < size(); ++root) {
        const auto r = static_cast<size_t>(root);
        void* to = root == rank() ? out : nullptr;
        if (counts[r] != 0) api_->reduce(inputs[r], to, counts[r] * how.units, how.type, how.op, root, at_);
      }
    });
  }
  if (how.finish) prepare(out, out, mine, run.call.dtype, *how.finish);
}

void NcclGroup::scatter_exchanged(const Running& run, const Scattering& job) {
  const std::vector<const void*>& inputs = job.inputs;
  const std::vector<size_t>& counts = job.counts;
  const size_t element = size_of(run.call.dtype);
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
