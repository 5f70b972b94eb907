#include <algorithm>

#include "common/partition.h"
#include "cuda/nccl_group.h"

// Uses NCCL's reductions where it has them. Otherwise NCCL only brings the inputs together, in steps that fit into the
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

void NcclGroup::check_possible(DType dtype, const Reduction& reduction) const {
  if (size() <= kMostDeviceRanks || nccl_reduction_of(dtype, reduction, size())) return;
  throw InvalidArgument(std::string("NCCL does not have ") + name_of(reduction.kind) + " of " + name_of(dtype) +
                        ", which a device does for at most " + std::to_string(kMostDeviceRanks) +
                        " ranks, and the group has " + std::to_string(size()) +
                        ". Reduce over smaller groups, one after the other, or set OURS_DEVICE_ENGINE=staging");
}

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
        invoke(nccl_->all_reduce, in, out, units, how.type, how.op, comm(), stream());
      } else {
        invoke(nccl_->reduce, in, out, units, how.type, how.op, job.root, comm(), stream());
      }
    });
    if (how.finish && mine) prepare(out, out, part.size(), run.call.dtype, *how.finish);
  }
}

void NcclGroup::prepare(void* to, const void* from, size_t count, DType dtype, const Reduction& reduction) {
  if (count != 0) device().reduce({to}, {from}, count, dtype, reduction, stream());
}

/// Brings all ranks' inputs to the ranks that get the result.
void NcclGroup::reduce_gathered(const Running& run, const Whole& job) {
  constexpr NcclType kBytes = NcclType::UInt8;
  const size_t element = size_of(run.call.dtype);
  const bool mine = job.root < 0 || job.root == rank();
  refuse_capture(run);
  const size_t step = slot_count(scratch_bytes_, static_cast<size_t>(size()), element);
  for (size_t k = 0; k < piece_count(job.count, step); ++k) {
    const Slice part = piece_of(job.count, step, k);
    const size_t bytes = part.size() * element;
    const void* const in = at(job.in, part.begin * element);
    const auto slot = [&](int r) { return scratch() + static_cast<size_t>(r) * bytes; };
    give_group(run, [&] {
      if (job.root < 0) return invoke(nccl_->all_gather, in, scratch(), bytes, kBytes, comm(), stream());
      invoke(nccl_->send, in, bytes, kBytes, job.root, comm(), stream());
      for (int peer = 0; mine && peer < size(); ++peer) {
        invoke(nccl_->receive, slot(peer), bytes, kBytes, peer, comm(), stream());
      }
    });
    if (!mine) continue;
    std::vector<const void*> inputs;
    for (int r = 0; r < size(); ++r) inputs.push_back(slot(r));
    void* const out = at(job.out, part.begin * element);
    device().reduce({out}, inputs, part.size(), run.call.dtype, job.reduction, stream());
  }
}

void NcclGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  claim(run);
  const auto how = nccl_reduction_of(run.call.dtype, job.reduction, size());
  if (how && !how->prepare) return scatter_by_nccl(run, job, *how);
  for (int root = 0; root < size(); ++root) {
    const auto r = static_cast<size_t>(root);
    reduce_to(run, {job.inputs[r], job.out, job.counts[r], job.reduction, root});
  }
}

void NcclGroup::scatter_by_nccl(const Running& run, const Scattering& job, const NcclReduction& how) {
  const size_t mine = job.counts[static_cast<size_t>(rank())];
  if (run.call.op == Op::ReduceScatterSingle) {  // all inputs are parts of one tensor, of the same size
    if (mine == 0) return;
    const size_t units = mine * how.units;
    give(run,
         [&] { invoke(nccl_->reduce_scatter, job.inputs[0], job.out, units, how.type, how.op, comm(), stream()); });
  } else {
    give_group(run, [&] {
      for (int root = 0; root < size(); ++root) {
        const auto r = static_cast<size_t>(root);
        void* const to = root == rank() ? job.out : nullptr;
        const size_t units = job.counts[r] * how.units;
        if (units == 0) continue;
        invoke(nccl_->reduce, job.inputs[r], to, units, how.type, how.op, root, comm(), stream());
      }
    });
  }
  if (how.finish) prepare(job.out, job.out, mine, run.call.dtype, *how.finish);
}

}  // namespace ours::cuda
