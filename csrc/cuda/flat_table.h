#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"
#include "cuda/flat_body.h"

// Finds the kernel for a pair of types.

namespace ours::cuda {

/// Make::make<Spec>() for a copy in units of that many bytes, or for a conversion; an empty result if there is none.
template <class Make>
struct FlatTable {
  using Made = typename Make::Made;

  static Made find_copy(size_t unit) {
    switch (unit) {
      case 1:
        return Make::template make<CopySpec<uint8_t>>();
      case 2:
        return Make::template make<CopySpec<uint16_t>>();
      case 4:
        return Make::template make<CopySpec<uint32_t>>();
      case 8:
        return Make::template make<CopySpec<uint64_t>>();
      default:
        return Made{};
    }
  }

  static Made find_conversion(DType from, DType to) {
    switch (from) {
      case DType::Float16:
        return conversion_of<Half>(to);
      case DType::BFloat16:
        return conversion_of<Brain>(to);
      case DType::Float32:
        return conversion_of<Plain<float>>(to);
      case DType::Float64:
        return conversion_of<Plain<double>>(to);
      default:
        return Made{};
    }
  }

  template <class From>
  static Made conversion_of(DType to) {
    switch (to) {
      case DType::Float16:
        return Make::template make<ConvertSpec<From, Half>>();
      case DType::BFloat16:
        return Make::template make<ConvertSpec<From, Brain>>();
      case DType::Float32:
        return Make::template make<ConvertSpec<From, Plain<float>>>();
      case DType::Float64:
        return Make::template make<ConvertSpec<From, Plain<double>>>();
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
