#include "kernels/plan.h"

#include <string>

#include "common/error.h"

namespace ours::kernels {
namespace {

Element element_of(DType dtype) {
  switch (dtype) {
    case DType::Bool:
      return Element::Bool;
    case DType::UInt8:
      return Element::U8;
    case DType::Int8:
      return Element::I8;
    case DType::UInt16:
      return Element::U16;
    case DType::Int16:
      return Element::I16;
    case DType::UInt32:
      return Element::U32;
    case DType::Int32:
      return Element::I32;
    case DType::UInt64:
      return Element::U64;
    case DType::Int64:
      return Element::I64;
    case DType::Float16:
      return Element::F16;
    case DType::BFloat16:
      return Element::BF16;
    case DType::Float32:
      return Element::F32;
    case DType::Float64:
      return Element::F64;
    case DType::Complex32:
      return Element::C32;
    case DType::Complex64:
      return Element::C64;
    case DType::Complex128:
      return Element::C128;
    default:
      // Unreachable, since check_supported() refuses the other types.
      throw InvalidArgument(std::string("dtype ") + name_of(dtype) + " cannot be reduced");
  }
}

Combine combine_of(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::Avg:
      return Combine::SumDivided;
    case ReduceKind::Product:
      return Combine::Product;
    case ReduceKind::Min:
      return Combine::Min;
    case ReduceKind::Max:
      return Combine::Max;
    case ReduceKind::BitAnd:
      return Combine::And;
    case ReduceKind::BitOr:
      return Combine::Or;
    case ReduceKind::BitXor:
      return Combine::Xor;
    case ReduceKind::PremulSum:
      return Combine::PremulSum;
    case ReduceKind::Sum:
    case ReduceKind::None:
      break;
  }
  return Combine::Sum;
}

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

Element unsigned_of(Element element) {
  switch (element) {
    case Element::I8:
      return Element::U8;
    case Element::I16:
      return Element::U16;
    case Element::I32:
      return Element::U32;
    case Element::I64:
      return Element::U64;
    default:
      return element;
  }
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
  const Element element = element_of(dtype);
  ReducePlan p{element, combine_of(reduction.kind), count, reduction.factor};
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
