#include <string>

#include "common/error.h"
#include "kernels/reduce.h"

namespace ours {
namespace {

constexpr ReduceKind kAllKinds[] = {ReduceKind::Sum,   ReduceKind::Avg,    ReduceKind::Product,
                                    ReduceKind::Min,   ReduceKind::Max,    ReduceKind::BitAnd,
                                    ReduceKind::BitOr, ReduceKind::BitXor, ReduceKind::PremulSum};

enum class Family { Bool, Integer, Floating, Complex, Unreducible };

Family family_of(DType dtype) {
  switch (dtype) {
    case DType::Bool:
      return Family::Bool;
    case DType::UInt8:
    case DType::Int8:
    case DType::UInt16:
    case DType::Int16:
    case DType::UInt32:
    case DType::Int32:
    case DType::UInt64:
    case DType::Int64:
      return Family::Integer;
    case DType::Float16:
    case DType::BFloat16:
    case DType::Float32:
    case DType::Float64:
      return Family::Floating;
    case DType::Complex32:
    case DType::Complex64:
    case DType::Complex128:
      return Family::Complex;
    case DType::Float8E4M3FN:
    case DType::Float8E5M2:
    case DType::Float8E4M3FNUZ:
    case DType::Float8E5M2FNUZ:
    case DType::Float8E8M0FNU:
    case DType::Opaque8:
      return Family::Unreducible;
  }
  return Family::Unreducible;
}

}  // namespace

const char* name_of(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::None:
      return "NONE";
    case ReduceKind::Sum:
      return "SUM";
    case ReduceKind::Avg:
      return "AVG";
    case ReduceKind::Product:
      return "PRODUCT";
    case ReduceKind::Min:
      return "MIN";
    case ReduceKind::Max:
      return "MAX";
    case ReduceKind::BitAnd:
      return "BAND";
    case ReduceKind::BitOr:
      return "BOR";
    case ReduceKind::BitXor:
      return "BXOR";
    case ReduceKind::PremulSum:
      return "PREMUL_SUM";
  }
  return "UNKNOWN";
}

bool is_supported(ReduceKind kind, DType dtype) {
  const Family family = family_of(dtype);
  if (family == Family::Unreducible) return false;
  switch (kind) {
    case ReduceKind::None:
      return false;
    case ReduceKind::Sum:
    case ReduceKind::Product:
      return true;
    case ReduceKind::Avg:
      return family != Family::Bool;
    case ReduceKind::Min:
    case ReduceKind::Max:
      return family != Family::Complex;
    case ReduceKind::BitAnd:
    case ReduceKind::BitOr:
    case ReduceKind::BitXor:
      return family == Family::Bool || family == Family::Integer;
    case ReduceKind::PremulSum:
      return family == Family::Floating || family == Family::Complex;
  }
  return false;
}

void check_supported(ReduceKind kind, DType dtype) {
  if (is_supported(kind, dtype)) return;
  std::string known;
  for (ReduceKind other : kAllKinds) {
    if (is_supported(other, dtype)) known += (known.empty() ? "" : ", ") + std::string(name_of(other));
  }
  const std::string type = name_of(dtype);
  const std::string advice =
      known.empty() ? type + " tensors can be moved but not reduced; convert to float16, bfloat16 or float32 first"
                    : "use one of " + known + " or convert the tensor to another dtype";
  throw InvalidArgument(std::string("reduce operation ") + name_of(kind) + " is not defined for dtype " + type + ": " +
                        advice);
}

}  // namespace ours
