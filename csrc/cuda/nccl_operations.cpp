#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>

#include "cuda/nccl_group.h"
#include "kernels/convert.h"

// Reductions are NCCL's own; only what it lacks of an average or of booleans is done to the result by a kernel of the
// device. Data that is moved unchanged is sent as bytes, so all types work.

namespace ours::cuda {
namespace {

struct Units {
  DType dtype;
  NcclType type;
  size_t count = 1;

  bool floating() const { return type >= NcclType::Float16; }
};

constexpr Units kUnits[] = {{DType::UInt8, NcclType::UInt8},          {DType::Int8, NcclType::Int8},
                            {DType::UInt32, NcclType::UInt32},        {DType::Int32, NcclType::Int32},
                            {DType::UInt64, NcclType::UInt64},        {DType::Int64, NcclType::Int64},
                            {DType::Float16, NcclType::Float16},      {DType::BFloat16, NcclType::BFloat16},
                            {DType::Float32, NcclType::Float32},      {DType::Float64, NcclType::Float64},
                            {DType::Complex32, NcclType::Float16, 2}, {DType::Complex64, NcclType::Float32, 2},
                            {DType::Complex128, NcclType::Float64, 2}};

/// Any byte but 0 is true: the maximum is true if one of them is, the minimum if all are. The result is made 0 or 1.
std::optional<NcclReduction> bool_reduction(ReduceKind kind) {
  const Reduction as_bits{ReduceKind::Sum, 1, 1.0};
  switch (kind) {
    case ReduceKind::Sum:
    case ReduceKind::Max:
    case ReduceKind::BitOr:
      return NcclReduction{NcclType::UInt8, NcclOp::Max, 1, std::nullopt, as_bits};
    case ReduceKind::Product:
    case ReduceKind::Min:
    case ReduceKind::BitAnd:
      return NcclReduction{NcclType::UInt8, NcclOp::Min, 1, std::nullopt, as_bits};
    default:
      return std::nullopt;
  }
}

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

constexpr NcclType kBytes = NcclType::UInt8;

}  // namespace

std::optional<NcclReduction> nccl_reduction_of(DType dtype, const Reduction& reduction, int ranks) {
  if (dtype == DType::Bool) return bool_reduction(reduction.kind);
  const auto* const units =
      std::find_if(std::begin(kUnits), std::end(kUnits), [&](const Units& row) { return row.dtype == dtype; });
  if (units == std::end(kUnits)) return std::nullopt;
  NcclReduction made{units->type, NcclOp::Sum, units->count, std::nullopt, std::nullopt};
  switch (reduction.kind) {
    case ReduceKind::Sum:
      return made;
    case ReduceKind::Avg:
      // NCCL's average of integers is not a truncating division of the sum, at least not in all versions.
      if (units->floating() && reduction.ranks == ranks) {
        made.op = NcclOp::Avg;
      } else {
        made.finish = reduction;
      }
      return made;
    case ReduceKind::PremulSum:
      made.factor = reduction.factor;
      return made;
    case ReduceKind::Product:
      made.op = NcclOp::Product;
      return units->count == 1 ? std::optional(made) : std::nullopt;
    case ReduceKind::Min:
    case ReduceKind::Max:
      made.op = reduction.kind == ReduceKind::Min ? NcclOp::Min : NcclOp::Max;
      return made;
    default:
      return std::nullopt;
  }
}

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

void NcclGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  if (plan.movement == Movement::Broadcast) {
    claim(run);
    const Span& buffer = plan.buffer();
    return give(run, [&] { broadcast(buffer.data, buffer, plan.root); });
  }
  claim(run, table_of(plan));
  if (plan.movement != Movement::AllGather) return exchange_directly(run, plan);
  const ConstSpan& input = *plan.sends[0];
  give(run, [&] {
    if (run.call.op == Op::AllGatherSingle && input.bytes != 0) {  // all outputs are equal parts of one tensor
      return invoke(nccl_->all_gather, input.data, plan.receives[0]->data, input.bytes, kBytes, comm(), stream());
    }
    for (int root = 0; root < size(); ++root) {
      broadcast(input.data, *plan.receives[static_cast<size_t>(root)], root);
    }
  });
}

/// `from` only counts on the root.
void NcclGroup::broadcast(const void* from, const Span& to, int root) {
  if (to.bytes == 0) return;
  invoke(nccl_->broadcast, root == rank() ? from : to.data, to.data, to.bytes, kBytes, root, comm(), stream());
}

/// Sends one message from each rank to each, all at once; a rank copies what it sends to itself.
void NcclGroup::exchange_directly(const Running& run, const ExchangePlan& plan) {
  const auto me = static_cast<size_t>(rank());
  give(run, [&] {
    for (int peer = 0; peer < size(); ++peer) {
      const auto p = static_cast<size_t>(peer);
      if (p == me) continue;
      if (plan.sent(p) != 0) invoke(nccl_->send, plan.sends[p]->data, plan.sent(p), kBytes, peer, comm(), stream());
      if (plan.received(p) == 0) continue;
      invoke(nccl_->receive, plan.receives[p]->data, plan.received(p), kBytes, peer, comm(), stream());
    }
  });
  if (!plan.sends[me] || !plan.receives[me] || plan.sent(me) == 0) return;
  if (plan.receives[me]->data == plan.sends[me]->data) return;
  device().copy(plan.receives[me]->data, plan.sends[me]->data, plan.sent(me), stream());
}

}  // namespace ours::cuda
