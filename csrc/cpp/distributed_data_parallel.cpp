#include <c10/core/GradMode.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <limits>
#include <unordered_set>

#include "ourddp/ourddp.h"
#include "reducer/bucket_plan.h"
#include "reducer/model_check.h"
#include "reducer/reducer.h"

// What ourddp/distributed.py and torch's class do, for models in C++.

namespace ourddp::detail {

namespace {

constexpr size_t kBroadcastBytes = 250 * 1024 * 1024;

/// The parameters that are trained, in the order of the modules. All vectors run parallel.
struct Trained {
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  std::vector<bool> sparse;  ///< has sparse gradients
};

bool has_sparse_gradients(const torch::nn::Module& module) {
  if (const auto* embedding = module.as<torch::nn::EmbeddingImpl>()) return embedding->options.sparse();
  if (const auto* bag = module.as<torch::nn::EmbeddingBagImpl>()) return bag->options.sparse();
  return false;
}

Trained trained_of(torch::nn::Module& model) {
  Trained found;
  std::unordered_set<c10::TensorImpl*> known;  // modules may share parameters
  for (const auto& module : model.named_modules()) {
    const std::string prefix = module.key().empty() ? "" : module.key() + '.';
    for (const auto& parameter : module.value()->named_parameters(/*recurse=*/false)) {
      const at::Tensor& tensor = parameter.value();
      if (!tensor.requires_grad() || !known.insert(tensor.unsafeGetTensorImpl()).second) continue;
      found.parameters.push_back(tensor);
      found.names.push_back(prefix + parameter.key());
      found.sparse.push_back(has_sparse_gradients(*module.value()));
    }
  }
  TORCH_CHECK(
      !found.parameters.empty(),
      "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.");
  for (const at::Tensor& parameter : found.parameters) {
    TORCH_CHECK_VALUE(parameter.device() == found.parameters.front().device(),
                      "DistributedDataParallel's input module must be on one device, but ", found.names.front(),
                      " is on ", found.parameters.front().device(), " and another parameter on ", parameter.device());
  }
  return found;
}

ours::ReducerOptions reducer_options(const Trained& trained, const Options& options) {
  TORCH_CHECK_VALUE(options.bucket_cap_mb >= 0, "bucket_cap_mb is ", options.bucket_cap_mb,
                    ": it must not be negative");
  ours::ReducerOptions made;
  made.parameter_names = trained.names;
  made.expect_sparse_gradients = trained.sparse;
  made.tune_bucket_size = options.bucket_cap_mb == 0;
  if (options.bucket_cap_mb != 0) made.bucket_bytes_cap = static_cast<int64_t>(options.bucket_cap_mb * 1024 * 1024);
  made.first_bucket_bytes_cap = std::min(made.first_bucket_bytes_cap, made.bucket_bytes_cap);
  made.find_unused_parameters = options.find_unused_parameters;
  made.gradient_as_bucket_view = options.gradient_as_bucket_view;
  if (!options.find_unused_parameters) {
    // They are rebuilt after the first backward. Until then reductions in the order of the parameters could get in the
    // way of other collectives that the model runs in backward.
    made.bucket_indices = ours::assign_buckets(ours::gradient_infos(trained.parameters, trained.sparse),
                                               {std::numeric_limits<int64_t>::max()}, {});
    std::reverse(made.bucket_indices.begin(), made.bucket_indices.end());
  }
  return made;
}

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  for (const at::Tensor& tensor : tensors) all.push_back(tensor.detach());
  return all;
}

}  // namespace

struct Wrapper::State {
  void broadcast(const std::vector<at::Tensor>& tensors) const {
    if (!tensors.empty()) c10d::broadcast_coalesced(group, detached(tensors), kBroadcastBytes);
  }

  c10::intrusive_ptr<c10d::ProcessGroup> group;
  Options options;
  std::vector<at::Tensor> buffers;
  std::shared_ptr<ours::Reducer> reducer;
  bool sync = true;
  bool buffers_due = true;  ///< false after a forward that only accumulates gradients, as in torch's class
};

Wrapper::Wrapper(torch::nn::Module& model, c10::intrusive_ptr<c10d::ProcessGroup> group, const Options& options)
    : state_(new State{std::move(group), options, model.buffers(), nullptr}) {
  TORCH_CHECK_VALUE(state_->group, "DistributedDataParallel needs a process group, such as the one of init()");
  const Trained trained = trained_of(model);
  ours::check_same_model(*state_->group, trained.parameters, trained.names);
  std::vector<at::Tensor> all = model.parameters();
  all.insert(all.end(), state_->buffers.begin(), state_->buffers.end());
  state_->broadcast(all);
  state_->reducer = ours::Reducer::create(trained.parameters, state_->group, reducer_options(trained, options));
}

Wrapper::~Wrapper() = default;
Wrapper::Wrapper(Wrapper&&) noexcept = default;
Wrapper& Wrapper::operator=(Wrapper&&) noexcept = default;

void Wrapper::before_forward() {
  ours::Reducer& reducer = *state_->reducer;
  reducer.close_memory();
  if (c10::GradMode::is_enabled()) {
    if (state_->sync) reducer.prepare_for_forward();
    reducer.rebuild_buckets();
  }
  if (state_->options.broadcast_buffers && state_->buffers_due) state_->broadcast(state_->buffers);
}

void Wrapper::after_forward(const std::vector<at::Tensor>& outputs) {
  const bool trains = c10::GradMode::is_enabled();
  state_->buffers_due = trains && state_->sync;
  if (!trains) return;
  if (!state_->sync) return state_->reducer->prepare_for_accumulation();
  state_->reducer->prepare_for_backward(state_->options.find_unused_parameters ? outputs : std::vector<at::Tensor>());
}

void Wrapper::set_weight(double weight) { state_->reducer->set_weight(weight); }

bool Wrapper::set_sync(bool sync) { return std::exchange(state_->sync, sync); }

}  // namespace ourddp::detail
