#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dtype.h"

namespace ours {

enum class ReduceKind : uint8_t { None, Sum, Avg, Product, Min, Max, BitAnd, BitOr, BitXor, PremulSum };

/// c10d's name of the operation, e.g. "SUM".
const char* name_of(ReduceKind kind);

/// A reduction over `size()` ranks. Avg divides the sum by `ranks`; PremulSum multiplies every input by `factor` first.
struct Reduction {
  ReduceKind kind = ReduceKind::Sum;
  int ranks = 1;
  double factor = 1.0;
};

/// True where the operation has a meaning for the type. BitAnd/BitOr/BitXor: integers and bool. Min/Max/Product: not
/// for Min/Max on complex. PremulSum: floating point and complex. fp8 and Opaque8: none.
bool is_supported(ReduceKind kind, DType dtype);

/// Throws InvalidArgument naming the operations that the type has, unless is_supported.
void check_supported(ReduceKind kind, DType dtype);

/// dst[i] = finish(src[0][i] op src[1][i] op ... op src[sources-1][i]) for i in [0, count), always in that order, so
/// that every rank and run gets the same bits. Half types (and Complex32) accumulate in fp32 and round once. `dst` may
/// be equal to one of the sources, but may not overlap one otherwise. Bool follows PyTorch: SUM is OR, PRODUCT is AND,
/// stored as 0/1. NaN propagates through MIN and MAX. Integer AVG truncates towards zero; integers wrap on overflow.
/// `stream` asks for non-temporal stores to dst (the result will not be read soon).
void reduce(void* dst, const void* const* srcs, int sources, size_t count, DType dtype, const Reduction& reduction,
            bool stream = false);

/// memcpy with non-temporal stores where the CPU has them: for results that leave the cache anyway.
void copy_stream(void* dst, const void* src, size_t bytes);

}  // namespace ours
