#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "common/dtype.h"
#include "kernels/reduce.h"

namespace ours {

/// The reduction that a c10d ReduceOp asks for over `ranks` ranks. Throws ValueError where it has no meaning for
/// `dtype`, naming what has.
Reduction reduction_of(const c10d::ReduceOp& op, DType dtype, int ranks);

}  // namespace ours
