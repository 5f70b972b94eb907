#include "kernels/plan.h"

#include <iterator>

namespace ours::kernels {
namespace {

// A type that can be reduced has the same number as an Element.
static_assert(static_cast<int>(DType::Bool) == static_cast<int>(Element::Bool) &&
              static_cast<int>(DType::Int64) == static_cast<int>(Element::I64) &&
              static_cast<int>(DType::Float64) == static_cast<int>(Element::F64) &&
              static_cast<int>(DType::Complex128) == static_cast<int>(Element::C128));

// In the order of ReduceKind.
constexpr Combine kCombines[] = {Combine::Sum, Combine::Sum, Combine::SumDivided, Combine::Product, Combine::Min,
                                 Combine::Max, Combine::And, Combine::Or,         Combine::Xor,     Combine::PremulSum};
static_assert(std::size(kCombines) == static_cast<size_t>(ReduceKind::PremulSum) + 1);

Combine bool_combine_of(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::Product:
    case ReduceKind::Min:
    case ReduceKind::BitAnd:
      return Combine::And;
    case ReduceKind::BitXor:
      return Combine::Xor;
    default:
      return Combine::Or;
  }
}

/// The unsigned type of a signed one; other types are returned as they are.
Element unsigned_of(Element element) {
  const bool is_signed =
      element == Element::I8 || element == Element::I16 || element == Element::I32 || element == Element::I64;
  return is_signed ? static_cast<Element>(static_cast<int>(element) - 1) : element;
}

/// The type of a complex number's parts; other types are returned as they are.
Element part_of(Element element) {
  switch (element) {
    case Element::C32:
      return Element::F16;
    case Element::C64:
      return Element::F32;
    case Element::C128:
      return Element::F64;
    default:
      return element;
  }
}

bool is_floating(Element element) {
  return element == Element::F16 || element == Element::BF16 || element == Element::F32 || element == Element::F64;
}

bool is_power_of_two(int n) { return n > 0 && (n & (n - 1)) == 0; }

}  // namespace

ReducePlan plan_reduction(DType dtype, size_t count, const Reduction& reduction) {
  const auto element = static_cast<Element>(dtype);
  ReducePlan p{element, kCombines[static_cast<size_t>(reduction.kind)], count, reduction.factor};
  if (element == Element::Bool) {
    p.combine = bool_combine_of(reduction.kind);
    return p;
  }
  switch (p.combine) {
    case Combine::And:
    case Combine::Or:
    case Combine::Xor:
      p.count *= size_of(dtype);
      p.element = Element::U8;
      return p;
    case Combine::Product:
      p.element = unsigned_of(element);
      return p;
    case Combine::Min:
    case Combine::Max:
      return p;
    default:
      break;
  }
  // Sums of complex numbers are sums of their parts.
  p.element = part_of(element);
  if (p.element != element) p.count *= 2;
  if (p.combine == Combine::Sum) p.element = unsigned_of(p.element);
  if (p.combine == Combine::SumDivided) {
    p.value = reduction.ranks;
    // Multiplying by the inverse of a power of two gives the same bits as dividing by it, and is several times faster.
    if (is_floating(p.element) && is_power_of_two(reduction.ranks)) {
      p.combine = Combine::SumScaled;
      p.value = 1.0 / reduction.ranks;
    }
  }
  return p;
}

}  // namespace ours::kernels
