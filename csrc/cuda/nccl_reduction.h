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
  size_t units;                     ///< values of that type in an element
  std::optional<double> factor;     ///< what NCCL multiplies each input by
  std::optional<Reduction> finish;  ///< what Device::reduce() makes of the result
};

/// Empty if NCCL lacks the reduction: bitwise operations, 16-bit integers, and products of complex numbers.
///
/// NCCL adds up in an order of its own, in steps that are rounded to the type, so results of floats differ from those
/// of the other engines in their last bits. Its minimum and maximum of floats may drop NaNs.
std::optional<NcclReduction> nccl_reduction_of(DType dtype, const Reduction& reduction, int ranks);

}  // namespace ours::cuda
