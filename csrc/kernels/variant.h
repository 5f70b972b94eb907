#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/reduce.h"

// The inside of reduce(): a set of loops for each vector width, which all give the same bits. The CPU's best one is
// used.

namespace ours::kernels {

/// The types that loops know, in the order of DType; a signed type follows its unsigned one. Complex types are pairs
/// of their parts, except in products.
enum class Element : uint8_t {
  Bool,
  U8,
  I8,
  U16,
  I16,
  U32,
  I32,
  U64,
  I64,
  F16,
  BF16,
  F32,
  F64,
  C32,
  C64,
  C128,
};

/// How two values become one, and what is done before (Premul) or after it (Scaled, Divided).
enum class Combine : uint8_t { Sum, SumScaled, SumDivided, PremulSum, Product, Min, Max, And, Or, Xor };

/// A reduction, as reduce() in reduce.h describes it. `value` is the factor or the divisor.
struct Task {
  char* dst;
  const char* const* srcs;
  int sources;
  size_t count;
  double value;
  bool stream;
};

using Loop = void (*)(const Task&);

struct Variant {
  const char* name;
  /// Null for a combination that the element does not have. Integers have Sum and Product only as unsigned types, and
  /// bitwise operations only as U8, since the bits are the same.
  Loop (*find)(Element element, Combine combine);
  void (*copy_stream)(char* dst, const char* src, size_t bytes);
  /// Convert between float32 and `half`, which is F16 or BF16.
  void (*widen)(Element half, char* dst, const char* src, size_t count);
  void (*narrow)(Element half, char* dst, const char* src, size_t count);
};

/// For any CPU, with vectors of 16 bytes, which are SSE2 on x86.
const Variant& portable_variant();

/// On aarch64.
const Variant& neon_variant();
/// On x86-64; null on a CPU without these instructions.
const Variant* avx2_variant();
const Variant* avx512_variant();

/// The variants that this CPU can run, the best one last.
const std::vector<const Variant*>& variants();

/// reduce() by a given variant, for tests and benchmarks.
void reduce_by(const Variant& variant, void* dst, const void* const* srcs, int sources, size_t count, DType dtype,
               const Reduction& reduction, bool stream);

}  // namespace ours::kernels
