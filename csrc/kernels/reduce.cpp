#include "kernels/reduce.h"

#include <cmath>
#include <complex>
#include <cstring>
#include <string>
#include <type_traits>

#include "common/error.h"

namespace ours {
namespace {

template <class T>
struct IsComplex : std::false_type {};
template <class T>
struct IsComplex<std::complex<T>> : std::true_type {};

struct BFloat16Bits {
  using Acc = float;
  uint16_t bits;
};
struct Float16Bits {
  using Acc = float;
  uint16_t bits;
};
struct Complex32Bits {
  using Acc = std::complex<float>;
  Float16Bits re, im;
};

float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

float widen(BFloat16Bits x) { return bits_to_float(uint32_t{x.bits} << 16); }

float widen(Float16Bits x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  const uint32_t exponent = (x.bits >> 10) & 31, fraction = x.bits & 1023u;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | fraction << 13 | (fraction != 0 ? 0x400000u : 0u));
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                        : bits_to_float((exponent + 112) << 23 | fraction << 13);
  return bits_to_float(sign | float_to_bits(magnitude));
}

std::complex<float> widen(Complex32Bits x) { return {widen(x.re), widen(x.im)}; }
template <class T>
T widen(T x) {
  return x;
}

void narrow(float f, BFloat16Bits& out) {
  const uint32_t u = float_to_bits(f);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  out.bits = static_cast<uint16_t>(nan ? (u >> 16) | 0x40u : (u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

void narrow(float f, Float16Bits& out) {
  const uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {
    half = static_cast<uint32_t>(std::lrint(std::ldexp(bits_to_float(magnitude), 24)));
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1)) >> 13;
  }
  out.bits = static_cast<uint16_t>(sign | half);
}

void narrow(std::complex<float> z, Complex32Bits& out) {
  narrow(z.real(), out.re);
  narrow(z.imag(), out.im);
}
template <class T>
void narrow(T x, T& out) {
  out = x;
}

// Complex products are spelt out: std::complex multiplies by a library call that rescues infinities, which is slow.
template <class T>
std::complex<T> multiply(std::complex<T> a, std::complex<T> b) {
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}
template <class T>
T multiply(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}
template <class T>
T add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  } else {
    return a + b;
  }
}

template <class T, class Combine, class Before, class After>
void loop(void* dst, const void* const* srcs, int sources, size_t count, Combine combine, Before before, After after) {
  const auto load = [&](int s, size_t i) {
    T x;
    std::memcpy(&x, static_cast<const char*>(srcs[s]) + i * sizeof(T), sizeof(T));
    return before(widen(x));
  };
  for (size_t i = 0; i < count; ++i) {
    auto acc = load(0, i);
    for (int s = 1; s < sources; ++s) acc = static_cast<decltype(acc)>(combine(acc, load(s, i)));
    T out;
    narrow(static_cast<decltype(acc)>(after(acc)), out);
    std::memcpy(static_cast<char*>(dst) + i * sizeof(T), &out, sizeof(T));
  }
}

template <class T>
void run(void* dst, const void* const* srcs, int sources, size_t count, const Reduction& reduction) {
  using A = decltype(widen(T{}));
  const auto same = [](A x) { return x; };
  const auto sum = [](A a, A b) { return add(a, b); };
  const auto go = [&](auto combine, auto before, auto after) {
    loop<T>(dst, srcs, sources, count, combine, before, after);
  };
  switch (reduction.kind) {
    case ReduceKind::Sum:
      return go(sum, same, same);
    case ReduceKind::Avg:
      if constexpr (IsComplex<A>::value) {
        const auto ranks = static_cast<typename A::value_type>(reduction.ranks);
        return go(sum, same, [=](A x) { return x / ranks; });
      } else if constexpr (std::is_same_v<A, uint64_t>) {
        return go(sum, same, [&](A x) { return x / static_cast<uint64_t>(reduction.ranks); });
      } else if constexpr (std::is_integral_v<A>) {
        return go(sum, same, [&](A x) { return static_cast<int64_t>(x) / reduction.ranks; });
      } else {
        return go(sum, same, [&](A x) { return x / static_cast<A>(reduction.ranks); });
      }
    case ReduceKind::Product:
      return go([](A a, A b) { return multiply(a, b); }, same, same);
    case ReduceKind::PremulSum:
      if constexpr (IsComplex<A>::value) {
        const auto factor = static_cast<typename A::value_type>(reduction.factor);
        return go(
            sum, [=](A x) { return x * factor; }, same);
      } else {
        return go(
            sum, [&](A x) { return static_cast<A>(x * static_cast<A>(reduction.factor)); }, same);
      }
    default:
      break;
  }
  if constexpr (!IsComplex<A>::value) {
    if (reduction.kind == ReduceKind::Min) return go([](A a, A b) { return a < b || a != a ? a : b; }, same, same);
    if (reduction.kind == ReduceKind::Max) return go([](A a, A b) { return a > b || a != a ? a : b; }, same, same);
  }
  if constexpr (std::is_integral_v<A>) {
    if (reduction.kind == ReduceKind::BitAnd) return go([](A a, A b) { return a & b; }, same, same);
    if (reduction.kind == ReduceKind::BitOr) return go([](A a, A b) { return a | b; }, same, same);
    if (reduction.kind == ReduceKind::BitXor) return go([](A a, A b) { return a ^ b; }, same, same);
  }
}

void run_bool(void* dst, const void* const* srcs, int sources, size_t count, ReduceKind kind) {
  const auto truth = [](uint8_t x) { return static_cast<uint8_t>(x != 0); };
  const auto same = [](uint8_t x) { return x; };
  const auto go = [&](auto combine) { loop<uint8_t>(dst, srcs, sources, count, combine, truth, same); };
  if (kind == ReduceKind::BitXor) return go([](uint8_t a, uint8_t b) { return a ^ b; });
  if (kind == ReduceKind::Product || kind == ReduceKind::Min || kind == ReduceKind::BitAnd) {
    return go([](uint8_t a, uint8_t b) { return a & b; });
  }
  return go([](uint8_t a, uint8_t b) { return a | b; });
}

}  // namespace

void reduce(void* dst, const void* const* srcs, int sources, size_t count, DType dtype, const Reduction& reduction,
            bool /*stream*/) {
  check_supported(reduction.kind, dtype);
  if (sources < 1) throw InvalidArgument("reduce needs at least one source, got " + std::to_string(sources));
  const auto go = [&](auto element) { run<decltype(element)>(dst, srcs, sources, count, reduction); };
  switch (dtype) {
    case DType::Bool:
      return run_bool(dst, srcs, sources, count, reduction.kind);
    case DType::UInt8:
      return go(uint8_t{});
    case DType::Int8:
      return go(int8_t{});
    case DType::UInt16:
      return go(uint16_t{});
    case DType::Int16:
      return go(int16_t{});
    case DType::UInt32:
      return go(uint32_t{});
    case DType::Int32:
      return go(int32_t{});
    case DType::UInt64:
      return go(uint64_t{});
    case DType::Int64:
      return go(int64_t{});
    case DType::Float16:
      return go(Float16Bits{});
    case DType::BFloat16:
      return go(BFloat16Bits{});
    case DType::Float32:
      return go(float{});
    case DType::Float64:
      return go(double{});
    case DType::Complex32:
      return go(Complex32Bits{});
    case DType::Complex64:
      return go(std::complex<float>{});
    case DType::Complex128:
      return go(std::complex<double>{});
    default:
      return;  // check_supported has thrown
  }
}

void copy_stream(void* dst, const void* src, size_t bytes) {
  if (bytes != 0) std::memcpy(dst, src, bytes);
}

}  // namespace ours
