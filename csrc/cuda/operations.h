#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/codec.h"

// An operation is applied to each input (before), to two values (combine) and to the result (after), with the meaning
// that it has in kernels/simd_loops.h. Files with kernels are compiled without fused multiply-add, which would round
// less often than the CPU does.

namespace ours::cuda {

template <class V>
struct Operation {
  OURS_BOTH void set(double) {}
  OURS_BOTH V before(V x) const { return x; }
  OURS_BOTH V after(V x) const { return x; }
};

template <class V>
struct Sum : Operation<V> {
  static OURS_BOTH V combine(V a, V b) { return static_cast<V>(a + b); }
};

template <class V>
struct WithFactor : Sum<V> {
  V factor;
  OURS_BOTH void set(double value) { factor = static_cast<V>(value); }
};

template <class V>
struct SumScaled : WithFactor<V> {
  OURS_BOTH V after(V x) const { return x * this->factor; }
};

template <class V>
struct SumDivided : WithFactor<V> {
  OURS_BOTH V after(V x) const { return x / this->factor; }
};

/// Integers are added as unsigned numbers, which wrap, and divided as the numbers that they represent. The divisor is
/// an int and may be too large for the type.
template <class V>
struct IntegerDivided : Operation<V> {
  using Unsigned = std::make_unsigned_t<V>;
  using Narrow = std::conditional_t<std::is_signed_v<V>, int32_t, uint32_t>;
  using Wide = std::conditional_t<std::is_signed_v<V>, int64_t, uint64_t>;
  using Divided = std::conditional_t<(sizeof(V) > sizeof(Narrow)), Wide, Narrow>;
  Divided divisor;
  OURS_BOTH void set(double value) { divisor = static_cast<Divided>(value); }
  static OURS_BOTH V combine(V a, V b) {
    return static_cast<V>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
  }
  OURS_BOTH V after(V x) const { return static_cast<V>(static_cast<Divided>(x) / divisor); }
};

template <class V>
struct PremulSum : WithFactor<V> {
  OURS_BOTH V before(V x) const { return x * this->factor; }
};

template <class V>
struct Product : Operation<V> {
  static OURS_BOTH V combine(V a, V b) {
    if constexpr (std::is_integral_v<V> && sizeof(V) < sizeof(uint32_t)) {
      // Unsigned, because the product of the largest values would overflow an int.
      return static_cast<V>(static_cast<uint32_t>(a) * static_cast<uint32_t>(b));
    } else {
      return a * b;
    }
  }
};

/// (a + bi)(c + di) by the school formula.
template <class V>
struct ComplexProduct : Operation<V> {
  static OURS_BOTH V combine(V a, V b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
};

// If the left value is a NaN, it stays; if the right one is, the comparison fails and it is taken. For integers, the
// comparison of a value with itself costs nothing.

template <class V>
struct Min : Operation<V> {
  static OURS_BOTH V combine(V a, V b) {
    if constexpr (std::is_floating_point_v<V>) return a < b || a != a ? a : b;
    return a < b ? a : b;
  }
};

template <class V>
struct Max : Operation<V> {
  static OURS_BOTH V combine(V a, V b) {
    if constexpr (std::is_floating_point_v<V>) return a > b || a != a ? a : b;
    return a > b ? a : b;
  }
};

template <class V>
struct And : Operation<V> {
  static OURS_BOTH V combine(V a, V b) { return a & b; }
};

template <class V>
struct Or : Operation<V> {
  static OURS_BOTH V combine(V a, V b) { return a | b; }
};

template <class V>
struct Xor : Operation<V> {
  static OURS_BOTH V combine(V a, V b) { return a ^ b; }
};

}  // namespace ours::cuda
