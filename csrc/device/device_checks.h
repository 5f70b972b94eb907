#pragma once

#include <cstddef>

#include "common/dtype.h"
#include "kernels/reduce.h"

// What every Device checks about its arguments before it gives work to a stream.

namespace ours {

/// Throws InvalidArgument unless Device::reduce() has a meaning for that many results and sources.
void check_device_reduction(size_t results, size_t sources, DType dtype, const Reduction& reduction);

}  // namespace ours
