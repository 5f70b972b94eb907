#include "kernels/variant.h"

namespace ours::kernels {

const std::vector<const Variant*>& variants() {
  static const std::vector<const Variant*> available = [] {
    std::vector<const Variant*> found = {&portable_variant()};
#if defined(__aarch64__)
    found.push_back(&neon_variant());
#elif defined(__x86_64__)
    for (const Variant* variant : {avx2_variant(), avx512_variant()}) {
      if (variant != nullptr) found.push_back(variant);
    }
#endif
    return found;
  }();
  return available;
}

}  // namespace ours::kernels
