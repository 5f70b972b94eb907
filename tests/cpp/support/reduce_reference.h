#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/dtype.h"
#include "kernels/reduce.h"

namespace ours::testing {

/// Value of a binary float of 16 bits with the given number of fraction bits.
float decode_16(uint16_t bits, int fraction_bits);

/// The nearest binary float of 16 bits, ties to even.
uint16_t encode_16(float value, int fraction_bits);

/// The results that reduce() promises, computed as plainly as possible: one element at a time, half types through
/// double arithmetic.
void reference_reduce(char* dst, const std::vector<const char*>& srcs, size_t count, DType dtype,
                      const Reduction& reduction);

/// Equal bits, or both NaN, in every float of the buffers.
bool same_values(const char* a, const char* b, size_t bytes, DType dtype);

/// A rank's numbers, whose reductions of that kind round nothing, whatever the order.
std::vector<char> exact_values(DType dtype, ReduceKind kind, int rank, size_t count);

}  // namespace ours::testing
