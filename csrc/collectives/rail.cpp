#include "collectives/rail.h"

#include <algorithm>

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
    // Divided once, in the end.
    result.kind = ReduceKind::Sum;
  }
  return result;
}

Reduction between_nodes(const Reduction& reduction, DType travels) {
  Reduction result = reduction;
  const bool scaled = reduction.kind == ReduceKind::PremulSum || divides_first(reduction, travels);
  if (scaled) result.kind = ReduceKind::Sum;
  return result;
}

Rail::Rail(TcpCall& tcp, Job job)
    : tcp_(tcp),
      job_(std::move(job)),
      element_(size_of(job_.dtype)),
      chunks_(job_.slices.chunks()),
      slots_(std::max<size_t>(1, std::min(chunks_, window()))),
      slice_bytes_(whole_lines(job_.slices.longest() * element_)) {}

Slice Rail::part_of(size_t chunk, size_t node) const {
  return slice_of(job_.slices.of(chunk, job_.rail).size(), static_cast<int>(nodes()), static_cast<int>(node),
                  job_.slices.align);
}

}  // namespace ours
