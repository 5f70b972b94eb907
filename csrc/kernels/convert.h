#pragma once

#include <cstddef>

#include "common/dtype.h"

// Conversions between float32 and the two types of half its size. `half` is Float16 or BFloat16.

namespace ours {

/// dst[i] = src[i], exactly.
void widen(float* dst, const void* src, DType half, size_t count);

/// dst[i] = src[i] rounded to nearest, ties to even. NaN stays NaN, and numbers beyond the range of Float16 (65504)
/// become infinity.
void narrow(void* dst, const float* src, DType half, size_t count);

}  // namespace ours
