#include "reducer/program_code.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <string>
#include <typeinfo>
#include <unordered_map>

#include "reducer/autograd_hooks.h"

namespace ours {
namespace {

using torch::autograd::Node;

/// The author of the code that a node runs.
enum class Author { kTorch, kProgram, kNotInCpp };

Author author_of(const std::type_info& type) {
  const std::string name = c10::demangle(type.name());
  const auto begins_with = [&](const char* prefix) { return name.rfind(prefix, 0) == 0; };
  if (name == "torch::autograd::PyNode") return Author::kNotInCpp;
  // A torch::autograd::Function that a program or an extension has written in C++.
  if (begins_with("torch::autograd::CppNode<")) return Author::kProgram;
  return begins_with("torch::") || begins_with("at::") ? Author::kTorch : Author::kProgram;
}

/// Does the same, remembered by type: graphs have thousands of nodes, of a few dozen types.
Author author_of(const Node& node) {
  thread_local std::unordered_map<const std::type_info*, Author> known;
  const std::type_info& type = typeid(node);
  const auto found = known.find(&type);
  return found != known.end() ? found->second : known.emplace(&type, author_of(type)).first->second;
}

bool has_hooks(Node& node) {
  return !node.pre_hooks().empty() || !node.tensor_pre_hooks().empty() ||
         node.tensor_post_acc_grad_hooks() != nullptr ||
         // The reducers of two models that share a parameter both write its gradient.
         node.post_hooks().size() > 1 ||
         !std::all_of(node.post_hooks().begin(), node.post_hooks().end(),
                      [](const auto& hook) { return AutogradHooks::is_harmless(*hook); });
}

bool runs_program_code(Node& node, const IsLibraryCode& is_library_code) {
  if (has_hooks(node)) return true;
  const Author author = author_of(node);
  return author == Author::kProgram || (author == Author::kNotInCpp && !(is_library_code && is_library_code(node)));
}

}  // namespace

bool backward_runs_no_program_code(const std::vector<const Node*>& awaited, const IsLibraryCode& is_library_code) {
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* planned = torch::autograd::get_current_graph_task_exec_info();
  if (nodes == nullptr || planned == nullptr || c10::impl::dispatch_mode_enabled()) return false;
  const auto comes = [&](const Node* node) {
    if (nodes->count(const_cast<Node*>(node)) == 0) return false;
    // Without a plan, everything runs that the graph reaches.
    if (planned->empty()) return true;
    const auto found = planned->find(const_cast<Node*>(node));
    return found != planned->end() && found->second.should_execute();
  };
  return std::all_of(awaited.begin(), awaited.end(), comes) &&
         std::none_of(nodes->begin(), nodes->end(),
                      [&](Node* node) { return runs_program_code(*node, is_library_code); });
}

}  // namespace ours
