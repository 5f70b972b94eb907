#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <utility>
#include <vector>

namespace ours {

/// The pointer by which this version of torch holds an autograd node: a shared or an intrusive one.
using NodePtr = std::decay_t<decltype(std::declval<const torch::autograd::Edge&>().function)>;

/// Calls back whenever autograd has accumulated the gradient of one of a list of parameters.
///
/// The nodes that accumulate are kept alive for as long as this object, because autograd itself drops a node, and the
/// hooks on it, with the last graph that uses it.
class AutogradHooks {
 public:
  /// `incoming` is the gradient before it was accumulated; perhaps undefined.
  using Callback = std::function<void(size_t parameter_index, const at::Tensor& incoming)>;

  AutogradHooks() = default;
  ~AutogradHooks() { detach(); }
  AutogradHooks(const AutogradHooks&) = delete;
  AutogradHooks& operator=(const AutogradHooks&) = delete;

  /// Finds the accumulating node of each parameter, and calls `callback` with the parameter's index after each
  /// accumulation, on the thread that autograd runs it on. Without a callback the nodes are only looked up.
  void attach(const std::vector<at::Tensor>& parameters, Callback callback);
  void detach();

  /// Says that from now on the callback may run code of the program, such as communication hooks.
  void set_runs_program_code() { runs_program_code_ = true; }
  bool runs_program_code() const { return runs_program_code_; }
  /// Whether `hook` was attached by an object of this class, and runs no code of the program.
  static bool is_harmless(const torch::autograd::FunctionPostHook& hook);

  /// Whether the backward that runs on this thread accumulates any of the gradients; that of torch.autograd.grad()
  /// may not. True outside of a backward.
  bool will_call() const;

  /// The accumulating node of each parameter; stays valid after detach().
  const std::vector<NodePtr>& accumulators() const { return accumulators_; }

 private:
  Callback callback_;
  bool runs_program_code_ = false;
  std::vector<NodePtr> accumulators_;
  std::vector<std::pair<size_t, uintptr_t>> keys_;
};

}  // namespace ours
