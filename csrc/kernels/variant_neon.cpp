#include "kernels/variant.h"

#if defined(__aarch64__)

#include <arm_neon.h>

#include "kernels/simd_convert.h"
#include "kernels/simd_loops.h"

namespace ours::kernels {
namespace {

struct Neon {
  static constexpr size_t kBytes = 16;
  // Arm's cores recognise streams of stores by themselves.
  static constexpr bool kStreams = false;

  static OURS_INLINE void load_halves(const char* p, Vec<Neon, float>& low, Vec<Neon, float>& high) {
    uint16x8_t bits;
    std::memcpy(&bits, p, kBytes);
    const float16x8_t halves = vreinterpretq_f16_u16(bits);
    low = bits_as<Vec<Neon, float>>(vcvt_f32_f16(vget_low_f16(halves)));
    high = bits_as<Vec<Neon, float>>(vcvt_high_f32_f16(halves));
  }
  static OURS_INLINE Vec<Neon, uint32_t> join_halves(Vec<Neon, float> low, Vec<Neon, float> high) {
    const float16x4_t first = vcvt_f16_f32(bits_as<float32x4_t>(low));
    return bits_as<Vec<Neon, uint32_t>>(vcvt_high_f16_f32(first, bits_as<float32x4_t>(high)));
  }
};

constexpr Variant kVariant{"neon", Loops<Neon>::find, Loops<Neon>::copy_stream, Conversions<Neon>::widen,
                           Conversions<Neon>::narrow};

}  // namespace

const Variant& neon_variant() { return kVariant; }

}  // namespace ours::kernels

#endif
