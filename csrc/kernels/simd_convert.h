#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/simd.h"
#include "kernels/variant.h"

// Conversions between float32 and its half types in one instruction set. Include it in the same way as simd.h.

namespace ours::kernels {

template <class Isa>
struct Conversions {
  using V = Vec<Isa, float>;
  using U = Vec<Isa, uint32_t>;
  using Halves = typename VectorOf<uint16_t, Isa::kBytes / 2>::Type;
  static constexpr size_t kLanes = Isa::kBytes / sizeof(float);

  template <bool kBrain>
  static OURS_INLINE V widen_one(const Halves& halves) {
    const U lanes = __builtin_convertvector(halves, U);
    if constexpr (kBrain) {
      return bits_as<V>(lanes << 16);
    } else {
      return HalfBits<Isa>::widen(lanes);
    }
  }

  template <bool kBrain>
  static OURS_INLINE Halves narrow_one(const V& x) {
    if constexpr (kBrain) {
      return __builtin_convertvector(BrainFloat<Isa>::round(x) >> 16, Halves);
    } else {
      return __builtin_convertvector(HalfBits<Isa>::narrow(x), Halves);
    }
  }

  template <class From, class To, class Convert>
  static OURS_INLINE void each(char* dst, const char* src, size_t count, Convert convert) {
    From from;
    To to;
    for (; count >= kLanes; count -= kLanes, src += sizeof(From), dst += sizeof(To)) {
      std::memcpy(&from, src, sizeof(from));
      to = convert(from);
      std::memcpy(dst, &to, sizeof(to));
    }
    if (count == 0) return;
    from = From{};
    std::memcpy(&from, src, count * (sizeof(From) / kLanes));
    to = convert(from);
    std::memcpy(dst, &to, count * (sizeof(To) / kLanes));
  }

  template <bool kBrain>
  struct Widen {
    OURS_INLINE V operator()(const Halves& x) const { return widen_one<kBrain>(x); }
  };
  template <bool kBrain>
  struct Narrow {
    OURS_INLINE Halves operator()(const V& x) const { return narrow_one<kBrain>(x); }
  };

  static void widen(Element half, char* dst, const char* src, size_t count) {
    if (half == Element::BF16) {
      each<Halves, V>(dst, src, count, Widen<true>{});
    } else {
      each<Halves, V>(dst, src, count, Widen<false>{});
    }
  }

  static void narrow(Element half, char* dst, const char* src, size_t count) {
    if (half == Element::BF16) {
      each<V, Halves>(dst, src, count, Narrow<true>{});
    } else {
      each<V, Halves>(dst, src, count, Narrow<false>{});
    }
  }
};

}  // namespace ours::kernels
