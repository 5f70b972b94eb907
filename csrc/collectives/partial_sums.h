#pragma once

#include "common/dtype.h"
#include "kernels/reduce.h"

// What to do with inputs and with partial sums, so that a reduction in several steps gives what one would.

namespace ours {

/// The reduction within a node of what is then reduced between nodes. Its results travel as `travels`.
Reduction within_node(const Reduction& reduction, DType travels);
/// And that between nodes.
Reduction between_nodes(const Reduction& reduction, DType travels);

/// A reduction whose partial sums, of type `dtype`, are in the range that its result is in: an average of float16 is
/// divided first, and others in the end.
Reduction within_range(const Reduction& reduction, DType dtype);

}  // namespace ours
