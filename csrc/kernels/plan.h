#pragma once

#include <cstddef>

#include "kernels/reduce.h"
#include "kernels/variant.h"

// Reduces the dtypes and operations of the interface to the fewer ones that the loops of the CPU and of devices have.

namespace ours::kernels {

/// A reduction as a loop sees it: `count` elements of type `element`. `value` is the factor or the divisor.
struct ReducePlan {
  Element element;
  Combine combine;
  size_t count;
  double value;
};

/// The plan for a reduction that check_supported() has accepted.
ReducePlan plan_reduction(DType dtype, size_t count, const Reduction& reduction);

}  // namespace ours::kernels
