#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "common/dtype.h"
#include "kernels/reduce.h"

namespace ours {

/// The reduction over `ranks` ranks that a c10d ReduceOp asks for. Throws ValueError if it is not defined for `dtype`,
/// and names what is.
Reduction reduction_of(const c10d::ReduceOp& op, DType dtype, int ranks);

}  // namespace ours
