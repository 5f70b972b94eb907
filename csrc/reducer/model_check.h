#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ours {

/// Checks that every rank of `group` has the same parameters: how many, and each one's dtype, shape and strides. Throws
/// a RuntimeError that names the first parameter that differs, both shapes, and the ranks.
///
/// A collective call. If the models agree, it costs one all-reduce of two integers; otherwise ranks exchange their
/// descriptions. `names` run parallel to `parameters` and may differ, as those of a wrapped module do.
void check_same_model(c10d::ProcessGroup& group, const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names);

}  // namespace ours
