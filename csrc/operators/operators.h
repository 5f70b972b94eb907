#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace ours {

/// Defines torch.ops.ours: collectives of any process group that return a new tensor, which is ready, and leave their
/// input as it is. Arguments are those of torch.ops._c10d_functional. They have gradients, and shapes without data for
/// torch.compile.
void register_operators();

/// The operators by which gradients travel, called through the dispatcher, so that gradients have gradients.
at::Tensor operator_all_reduce(const at::Tensor& input, const std::string& reduce_op, const std::string& group);
at::Tensor operator_all_gather(const at::Tensor& input, int64_t group_size, const std::string& group);
at::Tensor operator_reduce_scatter(const at::Tensor& input, const std::string& reduce_op, int64_t group_size,
                                   const std::string& group);
at::Tensor operator_all_to_all(const at::Tensor& input, at::SymIntArrayRef output_sizes, at::SymIntArrayRef input_sizes,
                               const std::string& group);
at::Tensor operator_reduce(const at::Tensor& input, const std::string& reduce_op, int64_t dst,
                           const std::string& group);
at::Tensor operator_broadcast(const at::Tensor& input, int64_t src, const std::string& group);

/// Gives them their gradients, and defines the two operators that have nothing else.
void register_operator_gradients();

}  // namespace ours
