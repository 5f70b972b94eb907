#pragma once

#include <cstddef>

#include "kernels/reduce.h"
#include "kernels/variant.h"

// From the dtypes and operations of the interface to the fewer ones that loops know: the CPU's, and those of a device.

namespace ours::kernels {

/// What a loop is told of a reduction: `count` elements as it sees them, `value` is the factor or the divisor.
struct ReducePlan {
  Element element;
  Combine combine;
  size_t count;
  double value;
};

/// Of a reduction that check_supported() has let through.
ReducePlan plan_reduction(DType dtype, size_t count, const Reduction& reduction);

}  // namespace ours::kernels
