#include "kernels/reduce.h"

#include <cstring>
#include <string>

#include "common/error.h"
#include "kernels/plan.h"
#include "kernels/variant.h"

namespace ours {
namespace kernels {

void reduce_by(const Variant& variant, void* dst, const void* const* srcs, int sources, size_t count, DType dtype,
               const Reduction& reduction, bool stream) {
  check_supported(reduction.kind, dtype);
  if (sources < 1) throw InvalidArgument("reduce needs at least one source, got " + std::to_string(sources));
  if (reduction.kind == ReduceKind::Avg && reduction.ranks < 1) {
    throw InvalidArgument("AVG needs the number of ranks, got " + std::to_string(reduction.ranks));
  }
  if (count == 0) return;
  const ReducePlan p = plan_reduction(dtype, count, reduction);
  const Loop loop = variant.find(p.element, p.combine);
  loop({static_cast<char*>(dst), reinterpret_cast<const char* const*>(srcs), sources, p.count, p.value, stream});
}

}  // namespace kernels

void reduce(void* dst, const void* const* srcs, int sources, size_t count, DType dtype, const Reduction& reduction,
            bool stream) {
  kernels::reduce_by(*kernels::variants().back(), dst, srcs, sources, count, dtype, reduction, stream);
}

void copy_bytes(void* dst, const void* src, size_t bytes, bool stream) {
  if (stream) {
    kernels::variants().back()->copy_stream(static_cast<char*>(dst), static_cast<const char*>(src), bytes);
  } else if (bytes != 0) {
    std::memcpy(dst, src, bytes);
  }
}

}  // namespace ours
