#include "backend/reduce_op.h"

#include <ATen/ops/item.h>

#include <utility>

#include "common/error.h"

namespace ours {

namespace {

constexpr std::pair<c10d::ReduceOp::RedOpType, ReduceKind> kKinds[] = {
    {c10d::ReduceOp::SUM, ReduceKind::Sum},
    {c10d::ReduceOp::AVG, ReduceKind::Avg},
    {c10d::ReduceOp::PRODUCT, ReduceKind::Product},
    {c10d::ReduceOp::MIN, ReduceKind::Min},
    {c10d::ReduceOp::MAX, ReduceKind::Max},
    {c10d::ReduceOp::BAND, ReduceKind::BitAnd},
    {c10d::ReduceOp::BOR, ReduceKind::BitOr},
    {c10d::ReduceOp::BXOR, ReduceKind::BitXor},
    {c10d::ReduceOp::PREMUL_SUM, ReduceKind::PremulSum},
};

ReduceKind kind_of(c10d::ReduceOp::RedOpType type) {
  for (const auto& [torch, kind] : kKinds) {
    if (torch == type) return kind;
  }
  TORCH_CHECK_VALUE(false, "unknown reduce operation number ", static_cast<int>(type),
                    "; use a member of torch.distributed.ReduceOp");
}

double factor_of(const c10d::ReduceOp& op) {
  // This is the name in all supported versions of torch.
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK_VALUE(supplement != nullptr,
                    "ReduceOp.PREMUL_SUM has no factor; create it with "
                    "torch.distributed._make_nccl_premul_sum(factor)");
  if (!supplement->tensor_factor.defined()) return supplement->double_factor;
  TORCH_CHECK_VALUE(supplement->tensor_factor.device().is_cpu(), "the factor of ReduceOp.PREMUL_SUM is on ",
                    supplement->tensor_factor.device(), "; pass a number or a CPU tensor");
  TORCH_CHECK_VALUE(!supplement->tensor_factor.is_complex(), "the factor of ReduceOp.PREMUL_SUM is of type ",
                    supplement->tensor_factor.scalar_type(), "; pass a real number");
  return supplement->tensor_factor.item().toDouble();
}

}  // namespace

Reduction reduction_of(const c10d::ReduceOp& op, DType dtype, int ranks) {
  Reduction reduction;
  reduction.kind = kind_of(op.op_);
  reduction.ranks = ranks;
  try {
    check_supported(reduction.kind, dtype);
  } catch (const InvalidArgument& e) {
    C10_THROW_ERROR(ValueError, e.what());
  }
  if (reduction.kind == ReduceKind::PremulSum) reduction.factor = factor_of(op);
  return reduction;
}

}  // namespace ours
