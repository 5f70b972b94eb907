#pragma once

#include <cstdint>

#include "cuda/operations.h"
#include "cuda/reduce_body.h"
#include "kernels/variant.h"

// Finds the reduction for an element and an operation; there are the same ones as in kernels/simd_loops.h.

namespace ours::cuda {

using kernels::Combine;
using kernels::Element;

/// Make::make<Spec>() for the reduction if there is one, otherwise an empty result (usually a null pointer).
template <class Make>
struct ReduceTable {
  using Made = typename Make::Made;

  template <class Codec, template <class> class Op>
  static Made make() {
    return Make::template make<ReduceSpec<Codec, Op>>();
  }

  template <class Codec>
  static Made bitwise(Combine combine) {
    if (combine == Combine::And) return make<Codec, And>();
    if (combine == Combine::Or) return make<Codec, Or>();
    if (combine == Combine::Xor) return make<Codec, Xor>();
    return Made{};
  }

  template <class T>
  static Made integer(Combine combine) {
    if (combine == Combine::Min) return make<Plain<T>, Min>();
    if (combine == Combine::Max) return make<Plain<T>, Max>();
    if (combine == Combine::SumDivided) return make<Plain<T>, IntegerDivided>();
    if constexpr (std::is_unsigned_v<T>) {
      if (combine == Combine::Sum) return make<Plain<T>, Sum>();
      if (combine == Combine::Product) return make<Plain<T>, Product>();
    }
    if constexpr (sizeof(T) == 1 && std::is_unsigned_v<T>) return bitwise<Plain<T>>(combine);
    return Made{};
  }

  template <class Codec>
  static Made floating(Combine combine) {
    switch (combine) {
      case Combine::Sum:
        return make<Codec, Sum>();
      case Combine::SumScaled:
        return make<Codec, SumScaled>();
      case Combine::SumDivided:
        return make<Codec, SumDivided>();
      case Combine::PremulSum:
        return make<Codec, PremulSum>();
      case Combine::Product:
        return make<Codec, Product>();
      case Combine::Min:
        return make<Codec, Min>();
      case Combine::Max:
        return make<Codec, Max>();
      default:
        return Made{};
    }
  }

  template <class Codec>
  static Made complex(Combine combine) {
    return combine == Combine::Product ? make<Codec, ComplexProduct>() : Made{};
  }

  static Made find(Element element, Combine combine) {
    switch (element) {
      case Element::Bool:
        return bitwise<BoolByte>(combine);
      case Element::U8:
        return integer<uint8_t>(combine);
      case Element::I8:
        return integer<int8_t>(combine);
      case Element::U16:
        return integer<uint16_t>(combine);
      case Element::I16:
        return integer<int16_t>(combine);
      case Element::U32:
        return integer<uint32_t>(combine);
      case Element::I32:
        return integer<int32_t>(combine);
      case Element::U64:
        return integer<uint64_t>(combine);
      case Element::I64:
        return integer<int64_t>(combine);
      case Element::F16:
        return floating<Half>(combine);
      case Element::BF16:
        return floating<Brain>(combine);
      case Element::F32:
        return floating<Plain<float>>(combine);
      case Element::F64:
        return floating<Plain<double>>(combine);
      case Element::C32:
        return complex<ComplexHalf>(combine);
      case Element::C64:
        return complex<ComplexNumber<float>>(combine);
      case Element::C128:
        return complex<ComplexNumber<double>>(combine);
      default:
        return Made{};
    }
  }
};

}  // namespace ours::cuda
