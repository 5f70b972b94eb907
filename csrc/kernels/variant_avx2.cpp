#include "kernels/variant.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#include <cstring>
#include <type_traits>

// Everything included below this line is compiled for these instructions. The standard headers are included above it,
// so that functions that they share with other files are not.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#endif

#include "kernels/simd_convert.h"
#include "kernels/simd_loops.h"

namespace ours::kernels {
namespace {

struct Avx2 {
  static constexpr size_t kBytes = 32;
  static constexpr bool kStreams = true;

  static OURS_INLINE void load_halves(const char* p, Vec<Avx2, float>& low, Vec<Avx2, float>& high) {
    low = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    high = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
  }
  static OURS_INLINE Vec<Avx2, uint32_t> join_halves(Vec<Avx2, float> low, Vec<Avx2, float> high) {
    const __m128i first = _mm256_cvtps_ph(low, _MM_FROUND_TO_NEAREST_INT);
    const __m128i second = _mm256_cvtps_ph(high, _MM_FROUND_TO_NEAREST_INT);
    return bits_as<Vec<Avx2, uint32_t>>(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
  }
  static OURS_INLINE void store_stream(char* p, Vec<Avx2, uint32_t> x) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), bits_as<__m256i>(x));
  }
  /// Non-temporal stores may pass later ones, so a fence has to precede a flag that says "written".
  static OURS_INLINE void end_stream() { _mm_sfence(); }
};

constexpr Variant kVariant{"avx2", Loops<Avx2>::find, Loops<Avx2>::copy_stream, Conversions<Avx2>::widen,
                           Conversions<Avx2>::narrow};

}  // namespace
}  // namespace ours::kernels

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace ours::kernels {

const Variant* avx2_variant() {
  // Not every compiler's __builtin_cpu_supports knows f16c.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2") ? &kVariant : nullptr;
}

}  // namespace ours::kernels

#endif
