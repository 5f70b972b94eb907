#include "kernels/variant.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>
#include <type_traits>

// Everything included below this line is compiled for these instructions. The standard headers are included above it,
// so that functions that they share with other files are not.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#include "kernels/simd_convert.h"
#include "kernels/simd_loops.h"

namespace ours::kernels {
namespace {

struct Avx512 {
  static constexpr size_t kBytes = 64;
  static constexpr bool kStreams = true;

  // These are the forms with a mask of all lanes, because GCC warns about its own header in the others.
  static OURS_INLINE void load_halves(const char* p, Vec<Avx512, float>& low, Vec<Avx512, float>& high) {
    low = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    high = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32)));
  }
  static OURS_INLINE Vec<Avx512, uint32_t> join_halves(Vec<Avx512, float> low, Vec<Avx512, float> high) {
    const __m256i halves[2] = {_mm512_maskz_cvtps_ph(0xffff, low, _MM_FROUND_TO_NEAREST_INT),
                               _mm512_maskz_cvtps_ph(0xffff, high, _MM_FROUND_TO_NEAREST_INT)};
    return bits_as<Vec<Avx512, uint32_t>>(halves);
  }
  static OURS_INLINE void store_stream(char* p, Vec<Avx512, uint32_t> x) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bits_as<__m512i>(x));
  }
  /// Non-temporal stores may pass later ones, so a fence has to precede a flag that says "written".
  static OURS_INLINE void end_stream() { _mm_sfence(); }
};

constexpr Variant kVariant{"avx512", Loops<Avx512>::find, Loops<Avx512>::copy_stream, Conversions<Avx512>::widen,
                           Conversions<Avx512>::narrow};

}  // namespace
}  // namespace ours::kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace ours::kernels {

const Variant* avx512_variant() {
  const bool supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return supported ? &kVariant : nullptr;
}

}  // namespace ours::kernels

#endif
