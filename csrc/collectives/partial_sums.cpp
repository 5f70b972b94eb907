#include "collectives/partial_sums.h"

namespace ours {

namespace {

/// A node's sum of float16 may be beyond its range although the average is not.
bool divides_first(const Reduction& reduction, DType travels) {
  return reduction.kind == ReduceKind::Avg && (travels == DType::Float16 || travels == DType::Complex32);
}

}  // namespace

Reduction within_node(const Reduction& reduction, DType travels) {
  Reduction result = reduction;
  if (divides_first(reduction, travels)) {
    result.kind = ReduceKind::PremulSum;
    result.factor = 1.0 / reduction.ranks;
  } else if (reduction.kind == ReduceKind::Avg) {
    // Divided only once, in the end.
    result.kind = ReduceKind::Sum;
  }
  return result;
}

Reduction between_nodes(const Reduction& reduction, DType travels) {
  return reduction.kind == ReduceKind::PremulSum || divides_first(reduction, travels) ? plain(reduction) : reduction;
}

Reduction plain(const Reduction& reduction) {
  Reduction result = reduction;
  if (reduction.kind == ReduceKind::PremulSum || reduction.kind == ReduceKind::Avg) result.kind = ReduceKind::Sum;
  return result;
}

Reduction within_range(const Reduction& reduction, DType dtype) {
  return divides_first(reduction, dtype) ? within_node(reduction, dtype) : reduction;
}

}  // namespace ours
