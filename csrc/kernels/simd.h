#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Vectors of Isa::kBytes bytes, by the compilers' vector extension, and codecs that load and store each element type.
// Every template has Isa as a parameter, so that a file that includes this under a `target` pragma gets instantiations
// of its own, which are never shared with other files.

#define OURS_INLINE inline __attribute__((always_inline))

// Put before a loop of constant length over accumulators, which stay in registers only if it is unrolled.
#if defined(__clang__)
#define OURS_UNROLL _Pragma("unroll")
#else
#define OURS_UNROLL _Pragma("GCC unroll 8")
#endif

namespace ours::kernels {

template <class T, size_t kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <class Isa, class T>
using Vec = typename VectorOf<T, Isa::kBytes>::Type;

template <class To, class From>
OURS_INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

/// A loaded value: kParts vectors (or scalars) that the operations treat alike.
template <class V, int kParts>
struct Parts {
  V part[kParts];
};

/// An element that is stored and computed in the same type.
template <class Isa, class T>
struct Plain {
  using Scalar = T;
  using Value = Parts<Vec<Isa, T>, 1>;
  static constexpr size_t kElementBytes = sizeof(T);
  static constexpr size_t kBytes = Isa::kBytes;
  static constexpr int kUnroll = 4;

  static OURS_INLINE Value load(const char* p) {
    Value x;
    std::memcpy(&x.part[0], p, kBytes);
    return x;
  }
  static OURS_INLINE Vec<Isa, uint32_t> encode(const Value& x) { return bits_as<Vec<Isa, uint32_t>>(x.part[0]); }
};

/// Bytes that count as 0 or not 0, and are computed and stored as 0 or 1.
template <class Isa>
struct BoolBytes : Plain<Isa, uint8_t> {
  using Base = Plain<Isa, uint8_t>;
  static OURS_INLINE typename Base::Value load(const char* p) {
    typename Base::Value x = Base::load(p);
    x.part[0] = bits_as<Vec<Isa, uint8_t>>(x.part[0] != 0) & 1;
    return x;
  }
};

/// bfloat16 is the upper half of a float32, so a shift and a mask split the two elements in a 32-bit lane: part 0 holds
/// the elements with even index, part 1 those with odd index.
template <class Isa>
struct BrainFloat {
  using Scalar = float;
  using V = Vec<Isa, float>;
  using U = Vec<Isa, uint32_t>;
  using Value = Parts<V, 2>;
  static constexpr size_t kElementBytes = 2;
  static constexpr size_t kBytes = Isa::kBytes;
  static constexpr int kUnroll = 2;

  static OURS_INLINE Value load(const char* p) {
    U lanes;
    std::memcpy(&lanes, p, kBytes);
    return {{bits_as<V>(lanes << 16), bits_as<V>(lanes & 0xffff0000u)}};
  }
  static OURS_INLINE U encode(const Value& x) { return round(x.part[0]) >> 16 | (round(x.part[1]) & 0xffff0000u); }
  /// Rounds to nearest even in the upper half; NaNs stay NaNs.
  static OURS_INLINE U round(V x) {
    const U u = bits_as<U>(x);
    const U rounded = u + 0x7fffu + (u >> 16 & 1u);
    const U quiet = u | 0x400000u;
    return x != x ? quiet : rounded;
  }
};

/// float16, converted by instructions.
template <class Isa>
struct HalfFloat {
  using Scalar = float;
  using V = Vec<Isa, float>;
  using Value = Parts<V, 2>;
  static constexpr size_t kElementBytes = 2;
  static constexpr size_t kBytes = Isa::kBytes;
  static constexpr int kUnroll = 2;

  static OURS_INLINE Value load(const char* p) {
    Value x;
    Isa::load_halves(p, x.part[0], x.part[1]);
    return x;
  }
  static OURS_INLINE Vec<Isa, uint32_t> encode(const Value& x) { return Isa::join_halves(x.part[0], x.part[1]); }
};

/// Converts between a float16 in a 32-bit lane and float32, in integer arithmetic. Gives the same bits as the
/// instructions of x86 (F16C), including quiet NaNs and their payloads.
template <class Isa>
struct HalfBits {
  using V = Vec<Isa, float>;
  using U = Vec<Isa, uint32_t>;
  using I = Vec<Isa, int32_t>;  // magnitudes are compared as signed numbers: SSE2 has no other comparison

  static OURS_INLINE V widen(U half) {
    const U magnitude = half & 0x7fffu;
    const U sign = (half & 0x8000u) << 16;
    const U normal = (magnitude << 13) + (112u << 23);
    const U special = magnitude << 13 | 0x7f800000u;
    // Subnormals: n * 2^-24 = (0.5 + n * 2^-24) - 0.5, where the sum is put together from bits.
    const U subnormal = bits_as<U>(bits_as<V>(magnitude + 0x3f000000u) - 0.5f);
    const I order = bits_as<I>(magnitude);
    const U quiet = bits_as<U>(order > 0x7c00) & 0x400000u;
    U result = order < 0x400 ? subnormal : normal;
    result = order > 0x7bff ? (special | quiet) : result;
    return bits_as<V>(result | sign);
  }
  static OURS_INLINE U narrow(V x) {
    const U u = bits_as<U>(x);
    const U magnitude = u & 0x7fffffffu;
    const U sign = u >> 16 & 0x8000u;
    const U normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    // Adding 0.5 makes the FPU round at 2^-24, the subnormals' unit.
    const U subnormal = bits_as<U>(bits_as<V>(magnitude) + 0.5f) - 0x3f000000u;
    const U nan = 0x7e00u | (magnitude >> 13 & 0x3ffu);
    const U infinity = (magnitude & 0u) | 0x7c00u;
    const I order = bits_as<I>(magnitude);
    U result = order < 0x38800000 ? subnormal : normal;
    result = order > 0x477fefff ? infinity : result;
    result = order > 0x7f800000 ? nan : result;
    return result | sign;
  }
};

/// Two float16 in a 32-bit lane: part 0 has the real parts (or even elements), part 1 the imaginary parts (or odd
/// ones).
template <class Isa>
struct HalfPairs {
  using Scalar = float;
  using U = Vec<Isa, uint32_t>;
  using Value = Parts<Vec<Isa, float>, 2>;
  static constexpr size_t kElementBytes = 4;
  static constexpr size_t kBytes = Isa::kBytes;
  static constexpr int kUnroll = 1;

  static OURS_INLINE Value load(const char* p) {
    U lanes;
    std::memcpy(&lanes, p, kBytes);
    return {{HalfBits<Isa>::widen(lanes & 0xffffu), HalfBits<Isa>::widen(lanes >> 16)}};
  }
  static OURS_INLINE U encode(const Value& x) {
    return HalfBits<Isa>::narrow(x.part[0]) | HalfBits<Isa>::narrow(x.part[1]) << 16;
  }
};

/// A complex number, not vectorised, since products of complex numbers are rare.
template <class Isa, class T>
struct ComplexNumber {
  using Scalar = T;
  using Value = Parts<T, 2>;
  static constexpr size_t kElementBytes = 2 * sizeof(T);
  static constexpr size_t kBytes = 2 * sizeof(T);
  static constexpr int kUnroll = 1;

  static OURS_INLINE Value load(const char* p) {
    Value x;
    std::memcpy(&x, p, kBytes);
    return x;
  }
  static OURS_INLINE Value encode(const Value& x) { return x; }
};

}  // namespace ours::kernels
