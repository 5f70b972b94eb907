#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "operators/operators.h"

namespace ours {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Each is differentiated as the function of all ranks' tensors that it is, where what is differentiated is the sum of
// all ranks' losses. The backward of each takes part in a collective too, so all ranks have to run it.

const std::string& text(AutogradContext* context, const char* name) { return context->saved_data[name].toStringRef(); }

int64_t number(AutogradContext* context, const char* name) { return context->saved_data[name].toInt(); }

void check_linear(const char* what, const std::string& reduce_op) {
  TORCH_CHECK_VALUE(reduce_op == "sum" || reduce_op == "avg", what, " of '", reduce_op,
                    "' has no gradient here, but 'sum' and 'avg' have. detach() its result if it needs none.");
}

struct AllReduce : Function<AllReduce> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const std::string& reduce_op,
                            const std::string& group) {
    context->saved_data["reduce_op"] = reduce_op;
    context->saved_data["group"] = group;
    const at::AutoDispatchBelowADInplaceOrView below;
    return operator_all_reduce(input, reduce_op, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    check_linear("An all_reduce", text(context, "reduce_op"));
    return {operator_all_reduce(gradients[0], text(context, "reduce_op"), text(context, "group")), {}, {}};
  }
};

struct AllGather : Function<AllGather> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, int64_t group_size,
                            const std::string& group) {
    context->saved_data["group_size"] = group_size;
    context->saved_data["group"] = group;
    context->saved_data["scalar"] = input.dim() == 0;
    const at::AutoDispatchBelowADInplaceOrView below;
    return operator_all_gather(input, group_size, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const at::Tensor own =
        operator_reduce_scatter(gradients[0], "sum", number(context, "group_size"), text(context, "group"));
    return {context->saved_data["scalar"].toBool() ? own.squeeze(0) : own, {}, {}};
  }
};

struct ReduceScatter : Function<ReduceScatter> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const std::string& reduce_op,
                            int64_t group_size, const std::string& group) {
    context->saved_data["reduce_op"] = reduce_op;
    context->saved_data["group_size"] = group_size;
    context->saved_data["group"] = group;
    const at::AutoDispatchBelowADInplaceOrView below;
    return operator_reduce_scatter(input, reduce_op, group_size, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string& reduce_op = text(context, "reduce_op");
    const int64_t size = number(context, "group_size");
    check_linear("A reduce_scatter_tensor", reduce_op);
    const at::Tensor part = reduce_op == "avg" ? gradients[0] / size : gradients[0];
    return {operator_all_gather(part, size, text(context, "group")), {}, {}, {}};
  }
};

struct AllToAll : Function<AllToAll> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, at::SymIntArrayRef output_sizes,
                            at::SymIntArrayRef input_sizes, const std::string& group) {
    std::vector<c10::SymInt> sent = input_sizes.vec();
    if (sent.empty() && !output_sizes.empty()) {  // equal parts, which backward gets back
      const auto ranks = static_cast<int64_t>(output_sizes.size());
      sent.assign(output_sizes.size(), input.dim() == 0 ? c10::SymInt(0) : input.sym_size(0) / ranks);
    }
    context->saved_data["output_sizes"] = output_sizes;
    context->saved_data["input_sizes"] = sent;
    context->saved_data["group"] = group;
    const at::AutoDispatchBelowADInplaceOrView below;
    return operator_all_to_all(input, output_sizes, input_sizes, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::vector<c10::SymInt> to = context->saved_data["input_sizes"].toSymIntVector();
    const std::vector<c10::SymInt> from = context->saved_data["output_sizes"].toSymIntVector();
    return {operator_all_to_all(gradients[0], to, from, text(context, "group")), {}, {}, {}};
  }
};

struct Broadcast : Function<Broadcast> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, int64_t src, const std::string& group) {
    context->saved_data["src"] = src;
    context->saved_data["group"] = group;
    const at::AutoDispatchBelowADInplaceOrView below;
    return operator_broadcast(input, src, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {operator_reduce(gradients[0], "sum", number(context, "src"), text(context, "group")), {}, {}};
  }
};

struct Reduce : Function<Reduce> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const std::string& reduce_op,
                            int64_t dst, const std::string& group) {
    context->saved_data["reduce_op"] = reduce_op;
    context->saved_data["dst"] = dst;
    context->saved_data["group"] = group;
    const at::AutoDispatchBelowADInplaceOrView below;
    return operator_reduce(input, reduce_op, dst, group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::string& reduce_op = text(context, "reduce_op");
    const std::string& group = text(context, "group");
    check_linear("A reduce", reduce_op);
    const at::Tensor sum = operator_broadcast(gradients[0], number(context, "dst"), group);
    return {reduce_op == "avg" ? sum / c10d::resolve_process_group(group)->getSize() : sum, {}, {}, {}};
  }
};

// These two are each other's gradient, so that gradients have gradients.
at::Tensor copy_to_ranks(const at::Tensor& input, const std::string& group);
at::Tensor reduce_from_ranks(const at::Tensor& input, const std::string& group);

struct CopyToRanks : Function<CopyToRanks> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const std::string& group) {
    context->saved_data["group"] = group;
    return input.view_as(input);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {reduce_from_ranks(gradients[0], text(context, "group")), {}};
  }
};

struct ReduceFromRanks : Function<ReduceFromRanks> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const std::string& group) {
    context->saved_data["group"] = group;
    return operator_all_reduce(input, "sum", group);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {copy_to_ranks(gradients[0], text(context, "group")), {}};
  }
};

at::Tensor copy_to_ranks(const at::Tensor& input, const std::string& group) { return CopyToRanks::apply(input, group); }

at::Tensor reduce_from_ranks(const at::Tensor& input, const std::string& group) {
  return ReduceFromRanks::apply(input, group);
}

/// The kernel of an operator whose gradient is that of `Differentiable`. Where nothing is recorded it costs nothing.
/// There are no forward-mode derivatives; Function raises an error for them.
template <class Differentiable, auto kCall, class... Args>
at::Tensor recorded(const at::Tensor& input, Args... args) {
  const bool records = (at::GradMode::is_enabled() && input.requires_grad()) || input._fw_grad(0).defined();
  if (records) return Differentiable::apply(input, args...);
  const at::AutoDispatchBelowADInplaceOrView below;
  return kCall(input, args...);
}

}  // namespace

void register_operator_gradients() {
  using Text = const std::string&;
  using Sizes = at::SymIntArrayRef;
  auto& gradients = *new torch::Library(torch::Library::IMPL, "ours", c10::DispatchKey::Autograd, __FILE__, __LINE__);
  gradients.impl("all_reduce", recorded<AllReduce, operator_all_reduce, Text, Text>);
  gradients.impl("all_gather_into_tensor", recorded<AllGather, operator_all_gather, int64_t, Text>);
  gradients.impl("reduce_scatter_tensor", recorded<ReduceScatter, operator_reduce_scatter, Text, int64_t, Text>);
  gradients.impl("all_to_all_single", recorded<AllToAll, operator_all_to_all, Sizes, Sizes, Text>);
  gradients.impl("reduce", recorded<Reduce, operator_reduce, Text, int64_t, Text>);
  gradients.impl("broadcast", recorded<Broadcast, operator_broadcast, int64_t, Text>);
  // Made of other operators, so torch.compile sees those.
  auto& composed = *new torch::Library(torch::Library::IMPL, "ours", c10::DispatchKey::CompositeImplicitAutograd,
                                       __FILE__, __LINE__);
  composed.impl("copy_to_ranks", copy_to_ranks);
  composed.impl("reduce_from_ranks", reduce_from_ranks);
}

}  // namespace ours
