#pragma once

// Data-parallel training for programs that are written in C++ with LibTorch, which has no DistributedDataParallel.
// docs/cpp.md shows how to build one. No Python is needed at run time.
//
// Errors are those of the Python package: c10::ValueError for what the caller did wrong, c10::DistNetworkError if a
// process died, c10::DistBackendError for other failures of communication, all of them c10::Error. Print
// what_without_backtrace().

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ourddp {

/// This process's place in its job, and the process group of all ranks, whose backend is "ours".
struct Job {
  std::string launcher;  ///< "torchrun", "Open MPI", "Hydra", "Slurm", or "none" if there was no launcher
  int rank;              ///< 0 to world_size - 1
  int world_size;        ///< processes of the job
  int local_rank;        ///< 0 to local_world_size - 1
  int local_world_size;  ///< processes of the job on this node
  c10::intrusive_ptr<c10d::ProcessGroup> group;
};

/// Joins the job that torchrun, mpirun, mpiexec or srun started this process in, or that RANK, WORLD_SIZE, MASTER_ADDR
/// and MASTER_PORT describe; without any, makes a job of this process alone. Returns when all ranks have come.
///
/// `timeout` is how long ranks wait for each other, here and in each operation of the group. Throws ValueError, which
/// names the variable to set, if the environment is incomplete or contradicts itself, and DistBackendError if the ranks
/// do not come together.
Job init(std::chrono::milliseconds timeout = std::chrono::minutes(30));

struct Options {
  /// MiB of gradients that are reduced together. 0: chosen from what reductions cost and when gradients arrive.
  double bucket_cap_mb = 25;
  /// Set it if a forward may leave parameters unused. They are searched for in the graph before each backward.
  bool find_unused_parameters = false;
  /// Let gradients be views of the memory in which they are reduced, which saves a copy. They must not be detached.
  bool gradient_as_bucket_view = false;
  /// Give all ranks rank 0's buffers, such as the means of batch norms, before each forward.
  bool broadcast_buffers = true;
};

namespace detail {

/// What DistributedDataParallel does, whatever the type of its model.
class Wrapper {
 public:
  Wrapper(torch::nn::Module& model, c10::intrusive_ptr<c10d::ProcessGroup> group, const Options& options);
  ~Wrapper();
  Wrapper(Wrapper&&) noexcept;
  Wrapper& operator=(Wrapper&&) noexcept;

  void before_forward();
  void after_forward(const std::vector<at::Tensor>& outputs);
  void set_weight(double weight);
  /// Sets whether the next backwards reduce gradients. Returns whether they did before.
  bool set_sync(bool sync);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <class Output>
void collect(const Output& output, std::vector<at::Tensor>& into) {
  static_assert(std::is_convertible_v<const Output&, at::Tensor>,
                "forward() has to return tensors: one, or vectors and tuples of them");
  into.push_back(output);
}
template <class Output>
void collect(const std::vector<Output>& output, std::vector<at::Tensor>& into) {
  for (const Output& one : output) collect(one, into);
}
template <class... Outputs>
void collect(const std::tuple<Outputs...>& output, std::vector<at::Tensor>& into) {
  std::apply([&](const auto&... each) { (collect(each, into), ...); }, output);
}

}  // namespace detail

/// Trains a model in several processes, each on its share of the data: backward gives all ranks the averages of their
/// gradients, and so the optimizers, each rank's own, keep the parameters equal. All ranks make the same calls.
///
///     ourddp::DistributedDataParallel model(net, job.group);
///     torch::optim::SGD optimizer(net->parameters(), 0.1);
///     auto loss = torch::cross_entropy_loss(model.forward(images), labels);
///     loss.backward();
///
/// `Model` is a module holder, such as torch::nn::Sequential, or a shared pointer to a module. Gradients are averaged
/// while backward runs.
template <class Model>
class DistributedDataParallel {
 public:
  /// Gives all ranks rank 0's parameters and buffers. A collective call. Throws RuntimeError (c10::Error) on all ranks
  /// if their models differ, which names the first parameter that does, both shapes, and the ranks; and if no parameter
  /// requires a gradient. The model must not get other parameters afterwards.
  DistributedDataParallel(Model model, c10::intrusive_ptr<c10d::ProcessGroup> group, const Options& options = {})
      : model_(std::move(model)), wrapper_(*model_, std::move(group), options) {}

  /// Calls the model's forward. Throws RuntimeError if the last backward left parameters without a gradient, and names
  /// them.
  template <class... Inputs>
  auto forward(Inputs&&... inputs) {
    wrapper_.before_forward();
    auto output = (*model_).forward(std::forward<Inputs>(inputs)...);
    std::vector<at::Tensor> tensors;
    detail::collect(output, tensors);
    wrapper_.after_forward(tensors);
    return output;
  }

  /// The model itself, for example to evaluate it without the other ranks.
  Model& module() { return model_; }

  /// While it exists, forward and backward only accumulate gradients on this rank. The first backward after that
  /// reduces what has been accumulated.
  class NoSync {
   public:
    explicit NoSync(detail::Wrapper& wrapper) : wrapper_(wrapper), before_(wrapper.set_sync(false)) {}
    ~NoSync() { wrapper_.set_sync(before_); }
    NoSync(const NoSync&) = delete;
    NoSync& operator=(const NoSync&) = delete;

   private:
    detail::Wrapper& wrapper_;
    const bool before_;
  };
  [[nodiscard]] NoSync no_sync() { return NoSync(wrapper_); }

  /// Weighs this rank's gradients in the next backward that reduces them: `weight` is the number of samples that this
  /// rank's loss is a sum over. See "Unequal batches" in docs/training.md.
  void set_weight(double weight) { wrapper_.set_weight(weight); }

 private:
  Model model_;
  detail::Wrapper wrapper_;
};

}  // namespace ourddp
