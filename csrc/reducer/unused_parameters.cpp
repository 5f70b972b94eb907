#include "reducer/unused_parameters.h"

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_set>

namespace ours {
namespace {

using torch::autograd::Node;

std::unordered_set<const Node*> reached_from(const std::vector<at::Tensor>& outputs) {
  std::unordered_set<const Node*> reached;
  std::vector<const Node*> to_visit;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && reached.insert(node).second) to_visit.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    // The gradient edge of a leaf is its accumulator: an output may be a parameter itself.
    if (output.defined() && output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!to_visit.empty()) {
    const Node* node = to_visit.back();
    to_visit.pop_back();
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return reached;
}

}  // namespace

void UnusedParameters::search(const std::vector<NodePtr>& accumulators, const std::vector<at::Tensor>& outputs) {
  RECORD_FUNCTION("torch.distributed.ddp.reducer::search_unused_parameters", std::vector<c10::IValue>());
  const auto reached = reached_from(outputs);
  indices_.clear();
  for (size_t index = 0; index < accumulators.size(); ++index) {
    if (reached.count(accumulators[index].get()) == 0) indices_.push_back(index);
  }
  if (indices_.empty()) {
    TORCH_WARN_ONCE(
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused parameters in the "
        "forward pass. The search through the graph costs time in every iteration: leave the flag off if all "
        "parameters are always used.");
  }
  if (!first_) first_ = indices_;
  if (*first_ != indices_) never_changed_ = false;
}

}  // namespace ours
