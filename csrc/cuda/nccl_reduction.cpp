#include "cuda/nccl_reduction.h"

#include <algorithm>
#include <iterator>

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

}  // namespace ours::cuda
