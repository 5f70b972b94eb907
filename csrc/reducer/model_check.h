#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ours {

/// Checks that every rank of `group` has the same parameters: how many, and each one's shape, strides and dtype.
///
/// A collective call. If the models agree, it costs one all-reduce of two integers. If they do not, the ranks
/// exchange their descriptions and all raise a RuntimeError that names the first parameter that differs, both shapes
/// and the ranks. `names` runs parallel to `parameters`.
void check_same_model(c10d::ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names);

}  // namespace ours
