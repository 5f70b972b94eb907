#include <iterator>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/listed.h"
#include "kernels/reduce.h"

namespace ours {
namespace {

// In the order of ReduceKind.
constexpr const char* kNames[] = {"NONE", "SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"};
static_assert(std::size(kNames) == static_cast<size_t>(ReduceKind::PremulSum) + 1, "a name for each ReduceKind");

enum class Family { Bool, Integer, Floating, Complex, Unreducible };

Family family_of(DType dtype) {
  // DType lists the types by family.
  if (dtype == DType::Bool) return Family::Bool;
  if (dtype <= DType::Int64) return Family::Integer;
  if (dtype <= DType::Float64) return Family::Floating;
  return dtype <= DType::Complex128 ? Family::Complex : Family::Unreducible;
}

}  // namespace

const char* name_of(ReduceKind kind) {
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kNames) ? kNames[index] : "UNKNOWN";
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
  std::vector<std::string> names;
  for (size_t other = 0; other < std::size(kNames); ++other) {
    if (is_supported(static_cast<ReduceKind>(other), dtype)) names.emplace_back(kNames[other]);
  }
  const std::string known = listed(names, [](const std::string& name) { return name; });
  const std::string type = name_of(dtype);
  const std::string advice =
      known.empty() ? type + " tensors can be moved but not reduced; convert to float16, bfloat16 or float32 first"
                    : "use one of " + known + " or convert the tensor to another dtype";
  throw InvalidArgument(std::string("reduce operation ") + name_of(kind) + " is not defined for dtype " + type + ": " +
                        advice);
}

}  // namespace ours
