#include "support/reduce_reference.h"

#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

namespace ours::testing {

float decode_16(uint16_t bits, int fraction_bits) {
  const int exponent_bits = 15 - fraction_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = bits >> fraction_bits & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << fraction_bits) - 1);
  double value;
  if (exponent == (1 << exponent_bits) - 1) {
    value = fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  } else if (exponent == 0) {
    value = std::ldexp(fraction, 1 - bias - fraction_bits);
  } else {
    value = std::ldexp(fraction + (1 << fraction_bits), exponent - bias - fraction_bits);
  }
  return static_cast<float>(bits >> 15 != 0 ? -value : value);
}

uint16_t encode_16(float value, int fraction_bits) {
  const int exponent_bits = 15 - fraction_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const unsigned sign = std::signbit(value) ? 0x8000u : 0u;
  const unsigned infinity = ((1u << exponent_bits) - 1) << fraction_bits;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (std::isnan(value)) return static_cast<uint16_t>(sign | infinity | 1u << (fraction_bits - 1));
  if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
  int exponent = magnitude == 0 ? 1 - bias : std::ilogb(magnitude);
  exponent = exponent < 1 - bias ? 1 - bias : exponent;
  // In units of the last place; carries of the rounding run into the exponent as they should.
  const auto units = static_cast<unsigned>(std::nearbyint(std::ldexp(magnitude, fraction_bits - exponent)));
  const auto bits = units + (static_cast<unsigned>(exponent + bias - 1) << fraction_bits);
  return static_cast<uint16_t>(sign | (bits > infinity ? infinity : bits));
}

namespace {

/// How an element is stored (Stored) and computed with (Value).
template <class T>
struct NativeElement {
  using Stored = T;
  using Value = T;
  static Value decode(Stored x) { return x; }
  static Stored encode(Value x) { return x; }
};

template <int kFractionBits>
struct HalfElement {
  using Stored = uint16_t;
  using Value = float;
  static Value decode(Stored x) { return decode_16(x, kFractionBits); }
  static Stored encode(Value x) { return encode_16(x, kFractionBits); }
};

struct BoolElement {
  using Stored = uint8_t;
  using Value = bool;
  static Value decode(Stored x) { return x != 0; }
  static Stored encode(Value x) { return x ? 1 : 0; }
};

struct HalfComplexElement {
  struct Stored {
    uint16_t re, im;
  };
  using Value = std::complex<float>;
  static Value decode(Stored x) { return {decode_16(x.re, 10), decode_16(x.im, 10)}; }
  static Stored encode(Value x) { return {encode_16(x.real(), 10), encode_16(x.imag(), 10)}; }
};

template <class T>
constexpr bool kIsComplex = false;
template <class T>
constexpr bool kIsComplex<std::complex<T>> = true;

template <class V>
V combine(ReduceKind kind, V a, V b) {
  if constexpr (std::is_same_v<V, bool>) {
    if (kind == ReduceKind::BitXor) return a != b;
    if (kind == ReduceKind::Sum || kind == ReduceKind::Max || kind == ReduceKind::BitOr) return a || b;
    return a && b;
  } else if constexpr (kIsComplex<V>) {
    if (kind != ReduceKind::Product) return a + b;
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  } else {
    if (kind == ReduceKind::Min) return a != a || a < b ? a : b;
    if (kind == ReduceKind::Max) return a != a || a > b ? a : b;
    if constexpr (std::is_integral_v<V>) {
      const auto x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
      if (kind == ReduceKind::BitAnd) return static_cast<V>(x & y);
      if (kind == ReduceKind::BitOr) return static_cast<V>(x | y);
      if (kind == ReduceKind::BitXor) return static_cast<V>(x ^ y);
      return static_cast<V>(kind == ReduceKind::Product ? x * y : x + y);
    } else {
      return kind == ReduceKind::Product ? a * b : a + b;
    }
  }
}

template <class V>
V divide(V x, int ranks) {
  if constexpr (kIsComplex<V>) {
    return {x.real() / static_cast<float>(ranks), x.imag() / static_cast<float>(ranks)};
  } else if constexpr (std::is_same_v<V, uint64_t>) {
    return x / static_cast<uint64_t>(ranks);
  } else if constexpr (std::is_integral_v<V>) {
    return static_cast<V>(static_cast<int64_t>(x) / ranks);
  } else {
    return x / static_cast<V>(ranks);
  }
}

template <class V>
V scale(V x, double factor) {
  if constexpr (kIsComplex<V>) {
    const auto f = static_cast<typename V::value_type>(factor);
    return {x.real() * f, x.imag() * f};
  } else {
    return static_cast<V>(x * static_cast<V>(factor));
  }
}

template <class E>
void reference_loop(char* dst, const std::vector<const char*>& srcs, size_t count, const Reduction& reduction) {
  using Stored = typename E::Stored;
  using Value = typename E::Value;
  for (size_t i = 0; i < count; ++i) {
    const auto load = [&](const char* src) {
      Stored x;
      std::memcpy(&x, src + i * sizeof(x), sizeof(x));
      const Value value = E::decode(x);
      return reduction.kind == ReduceKind::PremulSum ? scale(value, reduction.factor) : value;
    };
    Value acc = load(srcs[0]);
    for (size_t s = 1; s < srcs.size(); ++s) acc = combine<Value>(reduction.kind, acc, load(srcs[s]));
    if (reduction.kind == ReduceKind::Avg) acc = divide(acc, reduction.ranks);
    const Stored out = E::encode(acc);
    std::memcpy(dst + i * sizeof(out), &out, sizeof(out));
  }
}

/// Calls run(element) with how elements of that type are stored and computed with.
template <class Run>
void with_element(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::Bool:
      return run(BoolElement{});
    case DType::UInt8:
      return run(NativeElement<uint8_t>{});
    case DType::Int8:
      return run(NativeElement<int8_t>{});
    case DType::UInt16:
      return run(NativeElement<uint16_t>{});
    case DType::Int16:
      return run(NativeElement<int16_t>{});
    case DType::UInt32:
      return run(NativeElement<uint32_t>{});
    case DType::Int32:
      return run(NativeElement<int32_t>{});
    case DType::UInt64:
      return run(NativeElement<uint64_t>{});
    case DType::Int64:
      return run(NativeElement<int64_t>{});
    case DType::Float16:
      return run(HalfElement<10>{});
    case DType::BFloat16:
      return run(HalfElement<7>{});
    case DType::Float32:
      return run(NativeElement<float>{});
    case DType::Float64:
      return run(NativeElement<double>{});
    case DType::Complex32:
      return run(HalfComplexElement{});
    case DType::Complex64:
      return run(NativeElement<std::complex<float>>{});
    case DType::Complex128:
      return run(NativeElement<std::complex<double>>{});
    default:
      throw std::logic_error("not reducible");
  }
}

}  // namespace

void reference_reduce(char* dst, const std::vector<const char*>& srcs, size_t count, DType dtype,
                      const Reduction& reduction) {
  with_element(dtype, [&](auto element) { reference_loop<decltype(element)>(dst, srcs, count, reduction); });
}

bool same_values(const char* a, const char* b, size_t bytes, DType dtype) {
  const auto compare = [&](auto element) {
    using E = decltype(element);
    using Stored = typename E::Stored;
    for (size_t at = 0; at + sizeof(Stored) <= bytes; at += sizeof(Stored)) {
      Stored x, y;
      std::memcpy(&x, a + at, sizeof(x));
      std::memcpy(&y, b + at, sizeof(y));
      if (std::memcmp(&x, &y, sizeof(x)) != 0 && !(std::isnan(E::decode(x)) && std::isnan(E::decode(y)))) return false;
    }
    return true;
  };
  switch (dtype) {
    case DType::Float16:
    case DType::Complex32:
      return compare(HalfElement<10>{});
    case DType::BFloat16:
      return compare(HalfElement<7>{});
    case DType::Float32:
    case DType::Complex64:
      return compare(NativeElement<float>{});
    case DType::Float64:
    case DType::Complex128:
      return compare(NativeElement<double>{});
    default:
      return std::memcmp(a, b, bytes) == 0;
  }
}

std::vector<char> exact_values(DType dtype, ReduceKind kind, int rank, size_t count) {
  std::vector<char> bytes(count * size_of(dtype));
  with_element(dtype, [&](auto element) {
    using E = decltype(element);
    for (size_t i = 0; i < count; ++i) {
      const size_t mixed = i * 7 + static_cast<size_t>(rank) * 5;
      const auto value = static_cast<uint8_t>(kind == ReduceKind::Product ? 1 + (mixed % 11 == 0) : mixed % 4);
      const typename E::Stored stored = E::encode(static_cast<typename E::Value>(value));
      std::memcpy(&bytes[i * sizeof(stored)], &stored, sizeof(stored));
    }
  });
  return bytes;
}

}  // namespace ours::testing
