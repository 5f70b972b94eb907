#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "cuda/flat_body.h"

// Finds the kernel for a pair of types.

namespace ours::cuda {

/// Make::make<Spec>() for a pair of floating-point types; an empty result for others.
template <class Make>
struct FlatTable {
  using Made = typename Make::Made;

  static Made find(DType from, DType to) {
    return pick(from, [&](auto from_codec) {
      using From = decltype(from_codec);
      return pick(to, [](auto to_codec) { return Make::template make<FlatSpec<From, decltype(to_codec)>>(); });
    });
  }

 private:
  template <class Use>
  static Made pick(DType type, const Use& use) {
    switch (type) {
      case DType::Float16:
        return use(Half{});
      case DType::BFloat16:
        return use(Brain{});
      case DType::Float32:
        return use(Plain<float>{});
      case DType::Float64:
        return use(Plain<double>{});
      default:
        return Made{};
    }
  }
};

/// The properties of a kernel on which its launches depend.
struct FlatShape {
  size_t in_bytes = 0;
  size_t out_bytes = 0;
  size_t tile = 0;
};

template <class Spec>
constexpr FlatShape flat_shape_of() {
  return {sizeof(typename Spec::In), sizeof(typename Spec::Out), FlatThread<Spec>::kTile};
}

}  // namespace ours::cuda
