#pragma once

#include <cstddef>
#include <optional>

#include "cuda/nccl_api.h"
#include "kernels/reduce.h"

namespace ours::cuda {

/// The form in which a reduction is given to NCCL; computed by pure functions of what all ranks called.
struct NcclReduction {
  NcclType type;
  NcclOp op;
  size_t units;                      ///< values of that type in an element
  std::optional<Reduction> prepare;  ///< what Device::reduce() makes of each input first
  std::optional<Reduction> finish;   ///< and of the result
};

/// Empty if NCCL lacks the reduction or defines it differently: bitwise operations, 16-bit integers, products of
/// complex numbers, and the minimum and maximum of floats (whose NaNs NCCL drops). Then all inputs are brought
/// together, and Device::reduce() does it.
///
/// NCCL adds up in an order of its own, in steps that are rounded to the type, so results of floats differ from those
/// of the other engines in their last bits.
std::optional<NcclReduction> nccl_reduction_of(DType dtype, const Reduction& reduction, int ranks);

}  // namespace ours::cuda
