#include "kernels/simd_convert.h"
#include "kernels/simd_loops.h"

namespace ours::kernels {
namespace {

struct Portable {
  static constexpr size_t kBytes = 16;
  static constexpr bool kStreams = false;

  static OURS_INLINE void load_halves(const char* p, Vec<Portable, float>& even, Vec<Portable, float>& odd) {
    const auto x = HalfPairs<Portable>::load(p);
    even = x.part[0];
    odd = x.part[1];
  }
  static OURS_INLINE Vec<Portable, uint32_t> join_halves(Vec<Portable, float> even, Vec<Portable, float> odd) {
    return HalfPairs<Portable>::encode({{even, odd}});
  }
};

}  // namespace

const Variant& portable_variant() {
  static constexpr Variant kVariant{"portable", Loops<Portable>::find, Loops<Portable>::copy_stream,
                                    Conversions<Portable>::widen, Conversions<Portable>::narrow};
  return kVariant;
}

}  // namespace ours::kernels
