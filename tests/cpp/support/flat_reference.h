#pragma once

#include <cstddef>

#include "common/dtype.h"

namespace ours::testing {

/// to[i] = from[i] * scale, as flatten() of a device computes it.
void convert_scaled(void* to, DType to_type, const void* from, DType from_type, size_t count, double scale);

}  // namespace ours::testing
