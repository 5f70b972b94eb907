#include <string>

#include "cuda/nccl_group.h"
#include "kernels/convert.h"

// Reductions are NCCL's own; only what it lacks of an average or of booleans is done to the result by a kernel of the
// device.

namespace ours::cuda {
namespace {

/// Room for a value of any type that NCCL multiplies by.
using Factor = std::array<std::byte, sizeof(double)>;

Factor encode(double factor, NcclType type) {
  const auto narrower = static_cast<float>(factor);
  Factor encoded{};
  switch (type) {
    case NcclType::Float64:
      std::memcpy(encoded.data(), &factor, sizeof(factor));
      break;
    case NcclType::Float32:
      std::memcpy(encoded.data(), &narrower, sizeof(narrower));
      break;
    default:
      narrow(encoded.data(), &narrower, type == NcclType::Float16 ? DType::Float16 : DType::BFloat16, 1);
  }
  return encoded;
}

/// Differs between arrays that are cut in different ways; 0 for one that lies in one place.
uint64_t fingerprint_of_cuts(const Pieces& data) {
  uint64_t fingerprint = 0;
  data.visit(0, data.count(),
             [&](const std::byte*, size_t at, size_t) { fingerprint = fingerprint * 0x9E3779B97F4A7C15u + at; });
  return fingerprint;
}

}  // namespace

void NcclGroup::check_possible(DType dtype, const Reduction& reduction) const {
  if (nccl_reduction_of(dtype, reduction, size())) return;
  throw InvalidArgument(std::string("NCCL does not have ") + name_of(reduction.kind) + " of " + name_of(dtype) +
                        ". Set OURS_DEVICE_ENGINE=ipc (on one node) or OURS_DEVICE_ENGINE=staging, or reduce a copy "
                        "on the CPU (tensor.cpu())");
}

/// Gives NCCL the calls that `calls` makes with a reduction.
void NcclGroup::give_reductions(const Running& run, const NcclReduction& how,
                                const std::function<void(NcclOp)>& calls) {
  give(run, [&] {
    if (!how.factor) return calls(how.op);
    Factor factor = encode(*how.factor, how.type);
    NcclOp scaled{};
    invoke(nccl_->make_premul_sum, &scaled, static_cast<void*>(factor.data()), how.type, NcclScalar::OnHost, comm());
    calls(scaled);
    invoke(nccl_->drop_op, scaled, comm());  // what NCCL has been given does not need it any more
  });
}

void NcclGroup::finish(void* data, size_t count, DType dtype, const NcclReduction& how) {
  if (how.finish && count != 0) device().reduce({data}, {data}, count, dtype, *how.finish, stream());
}

void NcclGroup::do_reduce(const Running& run, const Reducing& job) {
  // NCCL gets a call for each piece, so all ranks must cut alike.
  claim({run.call, run.record, fingerprint_of_cuts(job.in)});
  const auto how = *nccl_reduction_of(run.call.dtype, job.reduction, size());
  const size_t element = size_of(run.call.dtype), count = job.in.count();
  give_reductions(run, how, [&](NcclOp op) {
    job.in.visit(0, count, [&](std::byte* in, size_t at, size_t n) {
      std::byte* const out = job.out == nullptr ? nullptr : job.out == &job.in ? in : job.out->whole() + at * element;
      if (job.root < 0) {
        invoke(nccl_->all_reduce, in, out, n * how.units, how.type, op, comm(), stream());
      } else {
        invoke(nccl_->reduce, in, out, n * how.units, how.type, op, job.root, comm(), stream());
      }
    });
  });
  if (job.out == nullptr) return;
  job.out->visit(0, count, [&](std::byte* out, size_t, size_t n) { finish(out, n, run.call.dtype, how); });
}

void NcclGroup::do_reduce_scatter(const Running& run, const Scattering& job) {
  claim(run);
  const auto how = *nccl_reduction_of(run.call.dtype, job.reduction, size());
  const size_t mine = job.counts[static_cast<size_t>(rank())];
  give_reductions(run, how, [&](NcclOp op) {
    if (run.call.op == Op::ReduceScatterSingle && mine != 0) {  // all inputs are parts of one tensor, of the same size
      return invoke(nccl_->reduce_scatter, job.inputs[0], job.out, mine * how.units, how.type, op, comm(), stream());
    }
    for (int root = 0; root < size(); ++root) {
      const auto r = static_cast<size_t>(root);
      void* const out = root == rank() ? job.out : nullptr;
      if (job.counts[r] == 0) continue;
      invoke(nccl_->reduce, job.inputs[r], out, job.counts[r] * how.units, how.type, op, root, comm(), stream());
    }
  });
  finish(job.out, mine, run.call.dtype, how);
}

}  // namespace ours::cuda
