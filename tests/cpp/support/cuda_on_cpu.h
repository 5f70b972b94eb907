#pragma once

#include <vector>

#include "cuda/reduce_launch.h"

// The kernels of csrc/cuda on the CPU: each thread runs the same code, one thread after the other.

namespace ours::testing {

cuda::ReduceLaunch reduce_on_cpu(const std::vector<void*>& results, const std::vector<const void*>& sources,
                                 size_t count, DType dtype, const Reduction& reduction);

}  // namespace ours::testing
