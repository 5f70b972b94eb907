#pragma once

#include "common/dtype.h"
#include "kernels/reduce.h"

// How to reduce inputs and partial sums so that a reduction in several steps gives what a single one would.

namespace ours {

/// The reduction within a node of data that is then reduced between nodes. Its results travel as `travels`.
Reduction within_node(const Reduction& reduction, DType travels);
/// The reduction between nodes that follows it.
Reduction between_nodes(const Reduction& reduction, DType travels);

/// The reduction of partial sums that are neither multiplied nor divided.
Reduction plain(const Reduction& reduction);

/// A reduction whose partial sums, of type `dtype`, stay in the range of its result: an average of float16 is divided
/// first, others in the end.
Reduction within_range(const Reduction& reduction, DType dtype);

}  // namespace ours
