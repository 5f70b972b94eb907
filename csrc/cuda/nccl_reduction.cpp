#include "cuda/nccl_reduction.h"

namespace ours::cuda {
namespace {

struct Units {
  NcclType type;
  size_t count;
  bool floating;
};

std::optional<Units> units_of(DType dtype) {
  switch (dtype) {
    case DType::Bool:
    case DType::UInt8:
      return Units{NcclType::UInt8, 1, false};
    case DType::Int8:
      return Units{NcclType::Int8, 1, false};
    case DType::UInt32:
      return Units{NcclType::UInt32, 1, false};
    case DType::Int32:
      return Units{NcclType::Int32, 1, false};
    case DType::UInt64:
      return Units{NcclType::UInt64, 1, false};
    case DType::Int64:
      return Units{NcclType::Int64, 1, false};
    case DType::Float16:
      return Units{NcclType::Float16, 1, true};
    case DType::BFloat16:
      return Units{NcclType::BFloat16, 1, true};
    case DType::Float32:
      return Units{NcclType::Float32, 1, true};
    case DType::Float64:
      return Units{NcclType::Float64, 1, true};
    case DType::Complex32:
      return Units{NcclType::Float16, 2, true};
    case DType::Complex64:
      return Units{NcclType::Float32, 2, true};
    case DType::Complex128:
      return Units{NcclType::Float64, 2, true};
    default:
      return std::nullopt;
  }
}

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

}  // namespace

std::optional<NcclReduction> nccl_reduction_of(DType dtype, const Reduction& reduction, int ranks) {
  if (dtype == DType::Bool) return bool_reduction(reduction.kind);
  const std::optional<Units> units = units_of(dtype);
  if (!units) return std::nullopt;
  NcclReduction made{units->type, NcclOp::Sum, units->count, std::nullopt, std::nullopt};
  switch (reduction.kind) {
    case ReduceKind::Sum:
      return made;
    case ReduceKind::Avg:
      // NCCL's average of integers is not a truncating division of the sum, at least not in all versions.
      if (units->floating && reduction.ranks == ranks) {
        made.op = NcclOp::Avg;
      } else {
        made.finish = reduction;
      }
      return made;
    case ReduceKind::PremulSum:
      made.prepare = reduction;
      return made;
    case ReduceKind::Product:
      made.op = NcclOp::Product;
      return units->count == 1 ? std::optional(made) : std::nullopt;
    case ReduceKind::Min:
    case ReduceKind::Max:
      made.op = reduction.kind == ReduceKind::Min ? NcclOp::Min : NcclOp::Max;
      return units->floating ? std::nullopt : std::optional(made);
    default:
      return std::nullopt;
  }
}

}  // namespace ours::cuda
