#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/simd.h"
#include "kernels/variant.h"

// The loops of one instruction set, made of simd.h's codecs and the operations below. Include it in the same way as
// simd.h.

namespace ours::kernels {

/// An operation is applied to each input (before), to two values (combine) and to the result (after). T is the scalar
/// type of the computation. An operation with kWhole gets all parts of a value at once. There are no constructors,
/// since those that derived classes inherit would not be compiled for Isa.
template <class Isa, class T>
struct Ops {
  using V = Vec<Isa, T>;

  struct Operation {
    static constexpr bool kWhole = false;
    OURS_INLINE void set(double) {}
    template <class X>
    OURS_INLINE X before(X x) const {
      return x;
    }
    template <class X>
    OURS_INLINE X after(X x) const {
      return x;
    }
  };

  struct Sum : Operation {
    static OURS_INLINE V combine(V a, V b) { return a + b; }
  };

  struct SumScaled : Sum {
    T factor;
    OURS_INLINE void set(double value) { factor = static_cast<T>(value); }
    OURS_INLINE V after(V x) const { return x * factor; }
  };

  struct SumDivided : Sum {
    T divisor;
    OURS_INLINE void set(double value) { divisor = static_cast<T>(value); }
    OURS_INLINE V after(V x) const { return x / divisor; }
  };

  /// Sums of T, which is unsigned so that they wrap, are divided as the type Number that they stand for. It divides
  /// lane by lane in 64 bits, since there is no vector division, and the divisor may be too large for the type.
  template <class Number>
  struct IntegerDivided : Sum {
    using Wide = std::conditional_t<std::is_signed_v<Number>, int64_t, uint64_t>;
    Wide divisor;
    OURS_INLINE void set(double value) { divisor = static_cast<Wide>(value); }
    OURS_INLINE V after(V x) const {
      Number lanes[sizeof(V) / sizeof(Number)];
      std::memcpy(lanes, &x, sizeof(x));
      divide(lanes, divisor);
      std::memcpy(&x, lanes, sizeof(x));
      return x;
    }
    // Not inlined, so that the divisions are not unrolled into every loop.
    static __attribute__((noinline)) void divide(Number (&lanes)[sizeof(V) / sizeof(Number)], Wide divisor) {
      for (Number& lane : lanes) lane = static_cast<Number>(static_cast<Wide>(lane) / divisor);
    }
  };

  struct PremulSum : Sum {
    T factor;
    OURS_INLINE void set(double value) { factor = static_cast<T>(value); }
    OURS_INLINE V before(V x) const { return x * factor; }
  };

  struct Product : Operation {
    static OURS_INLINE V combine(V a, V b) { return a * b; }
  };

  // A NaN in `a` is kept; a NaN in `b` fails the comparison and is taken.
  struct Min : Operation {
    static OURS_INLINE V combine(V a, V b) {
      if constexpr (std::is_floating_point_v<T>) {
        return ((a < b) | (a != a)) ? a : b;
      } else {
        return a < b ? a : b;
      }
    }
  };

  struct Max : Operation {
    static OURS_INLINE V combine(V a, V b) {
      if constexpr (std::is_floating_point_v<T>) {
        return ((a > b) | (a != a)) ? a : b;
      } else {
        return a > b ? a : b;
      }
    }
  };

  struct And : Operation {
    static OURS_INLINE V combine(V a, V b) { return a & b; }
  };

  struct Or : Operation {
    static OURS_INLINE V combine(V a, V b) { return a | b; }
  };

  struct Xor : Operation {
    static OURS_INLINE V combine(V a, V b) { return a ^ b; }
  };

  /// (a + bi)(c + di) by the textbook formula, without the rescue of infinities in C99's Annex G.
  struct ComplexProduct : Operation {
    static constexpr bool kWhole = true;
    template <class Value>
    static OURS_INLINE Value combine(const Value& x, const Value& y) {
      return {{x.part[0] * y.part[0] - x.part[1] * y.part[1], x.part[0] * y.part[1] + x.part[1] * y.part[0]}};
    }
  };
};

template <class Isa, class Codec, class Op>
struct Reducer {
  using Value = typename Codec::Value;
  static constexpr size_t kStep = Codec::kBytes;
  static constexpr size_t kBlock = kStep * Codec::kUnroll;
  static constexpr int kParts = sizeof(Value) / sizeof(Value{}.part[0]);

  static OURS_INLINE Value load(const Op& op, const char* p) {
    Value x = Codec::load(p);
    OURS_UNROLL
    for (int k = 0; k < kParts; ++k) x.part[k] = op.before(x.part[k]);
    return x;
  }

  static OURS_INLINE void fold(Value& acc, const Value& x) {
    if constexpr (Op::kWhole) {
      acc = Op::combine(acc, x);
    } else {
      OURS_UNROLL
      for (int k = 0; k < kParts; ++k) acc.part[k] = Op::combine(acc.part[k], x.part[k]);
    }
  }

  static OURS_INLINE auto finish(const Op& op, Value& acc) {
    OURS_UNROLL
    for (int k = 0; k < kParts; ++k) acc.part[k] = op.after(acc.part[k]);
    return Codec::encode(acc);
  }

  /// Reduces kUnroll vectors at byte `at`. The accumulators stay in registers while it walks the sources.
  template <int kUnroll, bool kStream>
  static OURS_INLINE void block(const Task& task, const Op& op, size_t at) {
    Value acc[kUnroll];
    OURS_UNROLL
    for (int u = 0; u < kUnroll; ++u) acc[u] = load(op, task.srcs[0] + at + u * kStep);
    for (int s = 1; s < task.sources; ++s) {
      const char* src = task.srcs[s] + at;
      OURS_UNROLL
      for (int u = 0; u < kUnroll; ++u) fold(acc[u], load(op, src + u * kStep));
    }
    OURS_UNROLL
    for (int u = 0; u < kUnroll; ++u) {
      const auto out = finish(op, acc[u]);
      char* to = task.dst + at + u * kStep;
      if constexpr (kStream) {
        Isa::store_stream(to, out);
      } else {
        std::memcpy(to, &out, kStep);
      }
    }
  }

  /// Reduces fewer bytes than a vector: with the same arithmetic, on vectors that are padded with zeros.
  static __attribute__((noinline)) void rest(const Task& task, const Op& op, size_t at, size_t bytes) {
    char padded[kStep] = {};
    std::memcpy(padded, task.srcs[0] + at, bytes);
    Value acc = load(op, padded);
    for (int s = 1; s < task.sources; ++s) {
      std::memcpy(padded, task.srcs[s] + at, bytes);
      fold(acc, load(op, padded));
    }
    const auto out = finish(op, acc);
    std::memcpy(task.dst + at, &out, bytes);
  }

  /// Reduces as many whole blocks as fit into [at, bytes). Returns where it stopped.
  template <bool kStream>
  static OURS_INLINE size_t blocks(const Task& task, const Op& op, size_t at, size_t bytes) {
    for (; bytes - at >= kBlock; at += kBlock) block<Codec::kUnroll, kStream>(task, op, at);
    return at;
  }

  static void run(const Task& task) {
    Op op;
    op.set(task.value);
    const size_t bytes = task.count * Codec::kElementBytes;
    size_t at = 0;
    if constexpr (Isa::kStreams && kStep == Isa::kBytes) {
      // Non-temporal stores need aligned addresses, so the bytes before the first one are stored in the ordinary way.
      const size_t head = (kStep - reinterpret_cast<uintptr_t>(task.dst) % kStep) % kStep;
      if (task.stream && head % Codec::kElementBytes == 0 && bytes >= head + kBlock) {
        if (head != 0) rest(task, op, 0, head);
        at = blocks<true>(task, op, head, bytes);
        Isa::end_stream();
      }
    }
    at = blocks<false>(task, op, at, bytes);
    for (; bytes - at >= kStep; at += kStep) block<1, false>(task, op, at);
    if (at != bytes) rest(task, op, at, bytes - at);
  }
};

template <class Isa>
struct Loops {
  template <class T>
  static Loop integer(Combine combine) {
    using C = Plain<Isa, T>;
    using O = Ops<Isa, T>;
    if (combine == Combine::SumDivided) {
      using U = std::make_unsigned_t<T>;
      return Reducer<Isa, Plain<Isa, U>, typename Ops<Isa, U>::template IntegerDivided<T>>::run;
    }
    if (combine == Combine::Min) return Reducer<Isa, C, typename O::Min>::run;
    if (combine == Combine::Max) return Reducer<Isa, C, typename O::Max>::run;
    if constexpr (std::is_unsigned_v<T>) {
      if (combine == Combine::Sum) return Reducer<Isa, C, typename O::Sum>::run;
      if (combine == Combine::Product) return Reducer<Isa, C, typename O::Product>::run;
    }
    if constexpr (std::is_same_v<T, uint8_t>) return bitwise<C>(combine);
    return nullptr;
  }

  template <class C>
  static Loop bitwise(Combine combine) {
    using O = Ops<Isa, uint8_t>;
    if (combine == Combine::And) return Reducer<Isa, C, typename O::And>::run;
    if (combine == Combine::Or) return Reducer<Isa, C, typename O::Or>::run;
    if (combine == Combine::Xor) return Reducer<Isa, C, typename O::Xor>::run;
    return nullptr;
  }

  template <class C>
  static Loop floating(Combine combine) {
    using O = Ops<Isa, typename C::Scalar>;
    // In the order of Combine, up to the bitwise operations.
    static constexpr Loop kLoops[] = {
        Reducer<Isa, C, typename O::Sum>::run,        Reducer<Isa, C, typename O::SumScaled>::run,
        Reducer<Isa, C, typename O::SumDivided>::run, Reducer<Isa, C, typename O::PremulSum>::run,
        Reducer<Isa, C, typename O::Product>::run,    Reducer<Isa, C, typename O::Min>::run,
        Reducer<Isa, C, typename O::Max>::run};
    static_assert(sizeof(kLoops) / sizeof(Loop) == static_cast<size_t>(Combine::And));
    return combine < Combine::And ? kLoops[static_cast<size_t>(combine)] : nullptr;
  }

  template <class C>
  static Loop complex(Combine combine) {
    using O = Ops<Isa, typename C::Scalar>;
    return combine == Combine::Product ? Reducer<Isa, C, typename O::ComplexProduct>::run : nullptr;
  }

  static Loop find(Element element, Combine combine) {
    // In the order of Element.
    static constexpr Loop (*kLoops[])(Combine) = {bitwise<BoolBytes<Isa>>,
                                                  integer<uint8_t>,
                                                  integer<int8_t>,
                                                  integer<uint16_t>,
                                                  integer<int16_t>,
                                                  integer<uint32_t>,
                                                  integer<int32_t>,
                                                  integer<uint64_t>,
                                                  integer<int64_t>,
                                                  floating<HalfFloat<Isa>>,
                                                  floating<BrainFloat<Isa>>,
                                                  floating<Plain<Isa, float>>,
                                                  floating<Plain<Isa, double>>,
                                                  complex<HalfPairs<Isa>>,
                                                  complex<ComplexNumber<Isa, float>>,
                                                  complex<ComplexNumber<Isa, double>>};
    static_assert(sizeof(kLoops) / sizeof(kLoops[0]) == static_cast<size_t>(Element::C128) + 1);
    return kLoops[static_cast<size_t>(element)](combine);
  }

  static void copy_stream(char* dst, const char* src, size_t bytes) {
    constexpr size_t kStep = Isa::kBytes, kBlock = 4 * kStep;
    size_t at = 0;
    if constexpr (Isa::kStreams) {
      const size_t head = (kStep - reinterpret_cast<uintptr_t>(dst) % kStep) % kStep;
      if (bytes >= head + kBlock) {
        if (head != 0) std::memcpy(dst, src, head);
        for (at = head; bytes - at >= kBlock; at += kBlock) {
          Vec<Isa, uint32_t> x[4];
          std::memcpy(&x, src + at, sizeof(x));
          for (size_t u = 0; u < 4; ++u) Isa::store_stream(dst + at + u * kStep, x[u]);
        }
        Isa::end_stream();
      }
    }
    if (at != bytes) std::memcpy(dst + at, src + at, bytes - at);
  }
};

}  // namespace ours::kernels
