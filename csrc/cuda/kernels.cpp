#include "cuda/kernels.h"

namespace ours::cuda {

std::vector<const void*> all_kernels() {
  std::vector<const void*> all;
  const auto add = [&](const void* function) {
    if (function != nullptr) all.push_back(function);
  };
  for (int e = 0; e <= static_cast<int>(Element::C128); ++e) {
    for (int c = 0; c <= static_cast<int>(Combine::Xor); ++c) {
      add(find_reduce_kernel(static_cast<Element>(e), static_cast<Combine>(c)).function);
    }
  }
  for (int from = 0; from <= static_cast<int>(DType::Opaque8); ++from) {
    for (int to = 0; to <= static_cast<int>(DType::Opaque8); ++to) {
      add(find_flat_kernel(static_cast<DType>(from), static_cast<DType>(to)).function);
    }
  }
  return all;
}

}  // namespace ours::cuda
