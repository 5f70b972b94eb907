#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <utility>

namespace ours {

/// Finds a parameter's gradient: `.grad`, or during a distributed backward (torch.distributed.autograd) the context's.
class GradientAccess {
 public:
  /// Takes the context of the distributed backward that runs on the calling thread, if one does.
  void adopt_thread_context() {
    context_ = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  }
  void forget_context() { context_.reset(); }

  /// Calls visit(at::Tensor& gradient), which returns whether it changed what the reference refers to.
  template <typename Visit>
  void visit(const at::Tensor& parameter, Visit&& visitor) const {
    if (context_) {
      context_->runGradCallbackForVariable(parameter, std::forward<Visit>(visitor));
    } else {
      visitor(parameter.mutable_grad());
    }
  }

 private:
  torch::distributed::autograd::ContextPtr context_;
};

}  // namespace ours
