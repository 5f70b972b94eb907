#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/convert.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

// Conversions between elements in memory and the values that are computed with. All that a kernel does is in
// functions that the CPU can run as well, so that tests can compare them with the CPU's own loops. NaNs may differ in
// their payloads, nothing else.

#if defined(__CUDACC__)
#define OURS_BOTH __host__ __device__ __forceinline__
#else
#define OURS_BOTH inline
#endif

#if defined(__CUDA_ARCH__)
#define OURS_UNROLL_ALL _Pragma("unroll")
#else
#define OURS_UNROLL_ALL
#endif

namespace ours::cuda {

/// The most bits that one instruction loads or stores.
struct alignas(16) Bits16 {
  uint32_t word[4];
};
constexpr size_t kVectorBytes = sizeof(Bits16);

/// Reads or writes bits at an address that is a multiple of their alignment.
template <class T>
OURS_BOTH T load(const char* address) {
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const T*>(address);
#else
  T bits;
  std::memcpy(&bits, address, sizeof(bits));
  return bits;
#endif
}

template <class T>
OURS_BOTH void store(char* address, const T& bits) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<T*>(address) = bits;
#else
  std::memcpy(address, &bits, sizeof(bits));
#endif
}

template <class To, class From>
OURS_BOTH To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

OURS_BOTH float float_of_half(uint16_t half) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(half));
#else
  float x = 0;
  widen(&x, &half, DType::Float16, 1);
  return x;
#endif
}

OURS_BOTH uint16_t half_of_float(float x) {
#if defined(__CUDA_ARCH__)
  return __half_as_ushort(__float2half_rn(x));
#else
  uint16_t half = 0;
  narrow(&half, &x, DType::Float16, 1);
  return half;
#endif
}

OURS_BOTH float float_of_brain(uint16_t brain) { return bits_as<float>(static_cast<uint32_t>(brain) << 16); }

OURS_BOTH uint16_t brain_of_float(float x) {
#if defined(__CUDA_ARCH__)
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
#else
  uint16_t brain = 0;
  narrow(&brain, &x, DType::BFloat16, 1);
  return brain;
#endif
}

// How an element is stored (Stored) and computed with (Value). The alignment of Stored is what its loads need.

template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static OURS_BOTH Value decode(Stored x) { return x; }
  static OURS_BOTH Stored encode(Value x) { return x; }
};

struct Half {
  using Stored = uint16_t;
  using Value = float;
  static OURS_BOTH Value decode(Stored x) { return float_of_half(x); }
  static OURS_BOTH Stored encode(Value x) { return half_of_float(x); }
};

struct Brain {
  using Stored = uint16_t;
  using Value = float;
  static OURS_BOTH Value decode(Stored x) { return float_of_brain(x); }
  static OURS_BOTH Stored encode(Value x) { return brain_of_float(x); }
};

/// A byte that is 0 or not; computed with and stored as 0 or 1.
struct BoolByte {
  using Stored = uint8_t;
  using Value = uint8_t;
  static OURS_BOTH Value decode(Stored x) { return x != 0 ? 1 : 0; }
  static OURS_BOTH Stored encode(Value x) { return x; }
};

template <class T>
struct Pair {
  T re, im;
};

template <class T>
struct ComplexNumber {
  using Stored = Pair<T>;
  using Value = Pair<T>;
  static OURS_BOTH Value decode(Stored x) { return x; }
  static OURS_BOTH Stored encode(Value x) { return x; }
};

struct ComplexHalf {
  using Stored = Pair<uint16_t>;
  using Value = Pair<float>;
  static OURS_BOTH Value decode(Stored x) { return {float_of_half(x.re), float_of_half(x.im)}; }
  static OURS_BOTH Stored encode(Value x) { return {half_of_float(x.re), half_of_float(x.im)}; }
};

}  // namespace ours::cuda
