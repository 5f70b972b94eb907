#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace ours {

enum class ReduceKind : uint8_t { None, Sum, Avg, Product, Min, Max, BitAnd, BitOr, BitXor, PremulSum };

/// c10d's name for the operation, e.g. "SUM".
const char* name_of(ReduceKind kind);

/// A reduction. Avg divides the sum by `ranks`; PremulSum multiplies every input by `factor` first.
struct Reduction {
  ReduceKind kind = ReduceKind::Sum;
  int ranks = 1;
  double factor = 1.0;
};

/// Whether the operation is defined for the type. BitAnd, BitOr and BitXor: integers and bool. Min and Max: not complex
/// numbers. PremulSum: floating point and complex numbers. Avg: not bool. fp8 and Opaque8: no operation.
bool is_supported(ReduceKind kind, DType dtype);

/// Throws InvalidArgument, which names the operations that the type has, unless is_supported().
void check_supported(ReduceKind kind, DType dtype);

/// dst[i] = finish(src[0][i] op src[1][i] op ... op src[sources-1][i]) for i in [0, count), always in this order, so
/// that every rank and every run gets the same bits. Half types (and Complex32) accumulate in fp32 and are rounded
/// once. `dst` may be equal to a source, but must not overlap one otherwise. Bool follows PyTorch: SUM is OR, PRODUCT
/// is AND, stored as 0 or 1. NaN propagates through MIN and MAX. Integer AVG truncates towards zero, and integers wrap
/// on overflow. `stream` asks for non-temporal stores to dst, for a result that will not be read soon.
void reduce(void* dst, const void* const* srcs, int sources, size_t count, DType dtype, const Reduction& reduction,
            bool stream = false);

/// A memcpy, also of nothing from nowhere. `stream` asks for non-temporal stores, where the CPU has them: for what
/// leaves the cache anyway, or is read next by a core that does not share it. They are ordered before later stores.
void copy_bytes(void* dst, const void* src, size_t bytes, bool stream);

}  // namespace ours
