#include "reducer/autograd_hooks.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

namespace ours {
namespace {

using torch::autograd::variable_list;

class AccumulationHook : public torch::autograd::FunctionPostHook {
 public:
  AccumulationHook(const AutogradHooks& owner, const AutogradHooks::Callback& callback, size_t index)
      : owner_(owner), callback_(callback), index_(index) {}

  bool runs_program_code() const { return owner_.runs_program_code(); }

  variable_list operator()(const variable_list& outputs, const variable_list& inputs) override {
    // A copy would count as one more owner of the gradient; see is_owned_by_parameter().
    if (inputs.empty()) {
      callback_(index_, {});
    } else {
      callback_(index_, inputs.front());
    }
    return outputs;
  }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& /*args*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "Compiled autograd cannot trace this reducer. Set torch._dynamo.config.optimize_ddp = "
                                "\"python_reducer\" before "
                                "the model is wrapped, or leave compiled autograd off.");
  }

 private:
  const AutogradHooks& owner_;
  const AutogradHooks::Callback& callback_;
  const size_t index_;
};

}  // namespace

void AutogradHooks::attach(const std::vector<at::Tensor>& parameters, Callback callback) {
  detach();
  accumulators_.clear();
  callback_ = std::move(callback);
  for (size_t index = 0; index < parameters.size(); ++index) {
    NodePtr node = torch::autograd::impl::grad_accumulator(parameters[index]);
    TORCH_CHECK(node, "Parameter ", index, " is not a leaf that requires a gradient.");
    if (callback_) {
      keys_.emplace_back(index, node->add_post_hook(std::make_unique<AccumulationHook>(*this, callback_, index)));
    }
    accumulators_.push_back(std::move(node));
  }
}

void AutogradHooks::detach() {
  for (const auto& [index, key] : keys_) accumulators_[index]->del_post_hook(key);
  keys_.clear();
}

bool AutogradHooks::is_harmless(const torch::autograd::FunctionPostHook& hook) {
  const auto* ours = dynamic_cast<const AccumulationHook*>(&hook);
  return ours != nullptr && !ours->runs_program_code();
}

bool AutogradHooks::will_call() const {
  const auto* planned = torch::autograd::get_current_graph_task_exec_info();
  // Without a plan, everything runs that the graph reaches.
  if (planned == nullptr || planned->empty()) return true;
  return std::any_of(accumulators_.begin(), accumulators_.end(), [&](const NodePtr& node) {
    const auto found = planned->find(node.get());
    return found != planned->end() && found->second.should_execute();
  });
}

}  // namespace ours
