#include "kernels/variant.h"

namespace ours::kernels {

const std::vector<const Variant*>& variants() {
  static const std::vector<const Variant*> available = [] {
    std::vector<const Variant*> found = {&portable_variant()};
    for (const Variant* variant : {neon_variant(), avx2_variant(), avx512_variant()}) {
      if (variant != nullptr) found.push_back(variant);
    }
    return found;
  }();
  return available;
}

}  // namespace ours::kernels
