// What can be done with ourddp::DistributedDataParallel besides the example, each in two ranks and checked there.

#include <ATen/ATen.h>
#include <ourddp/ourddp.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <iostream>

namespace {

using at::Tensor;
using ourddp::Job;

template <class Model>
using Parallel = ourddp::DistributedDataParallel<Model>;

void expect_close(const char* what, const Tensor& found, const Tensor& expected) {
  TORCH_CHECK(at::allclose(found, expected), what, ": found\n", found, "\nexpected\n", expected);
}

template <class Error, class Body>
void expect_error(const std::string& text, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    const std::string said = error.what_without_backtrace();
    TORCH_CHECK(said.find(text) != std::string::npos, "'", text, "' is missing in: ", said);
    return;
  }
  TORCH_CHECK(false, "there was no error, but '", text, "' was expected");
}

/// Has two outputs in containers, parameters that only one of them needs, a buffer, and a sparse gradient.
struct NetImpl : torch::nn::Module {
  NetImpl()
      : words(register_module("words", torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 3).sparse(true)))),
        norm(register_module("norm", torch::nn::BatchNorm1d(3))),
        first(register_module("first", torch::nn::Linear(3, 2))),
        second(register_module("second", torch::nn::Linear(3, 2))) {}

  std::tuple<Tensor, std::vector<Tensor>> forward(const Tensor& indices, bool both = true) {
    const Tensor hidden = norm(words(indices));
    std::vector<Tensor> more;
    if (both) more.push_back(second(hidden));
    return {first(hidden), more};
  }

  torch::nn::Embedding words;
  torch::nn::BatchNorm1d norm;
  torch::nn::Linear first;
  torch::nn::Linear second;
};
TORCH_MODULE(Net);

Tensor backward(Parallel<Net>& model, const Tensor& indices, bool both = true) {
  const auto [one, more] = model.forward(indices, both);
  Tensor loss = one.square().sum();
  for (const Tensor& each : more) loss = loss + each.sum();
  loss.backward();
  return loss;
}

void parameters_buffers_and_sparse_gradients(const Job& job) {
  torch::manual_seed(static_cast<uint64_t>(job.rank));  // the ranks' parameters differ
  Net net;
  net->norm->running_mean.fill_(job.rank + 1);
  Parallel<Net> model(net, job.group);
  expect_close("a buffer of rank 0", net->norm->running_mean, at::ones({3}));
  backward(model, at::tensor({2 * job.rank, 2 * job.rank + 1}));
  const Tensor sparse = net->words->weight.grad();
  TORCH_CHECK(sparse.is_sparse() && sparse.coalesce().indices().size(1) == 4, "all words have gradients");
  expect_close("second.bias", net->second->bias.grad(), at::full({2}, 2.0));

  std::vector<std::vector<Tensor>> all(1);
  for (int rank = 0; rank < 2; ++rank) all[0].push_back(at::empty_like(net->first->weight));
  std::vector<Tensor> own{net->first->weight.grad()};
  job.group->allgather(all, own)->wait();
  TORCH_CHECK(all[0][0].equal(all[0][1]), "the gradients of the ranks have the same bits");
}

void unused_parameters(const Job& job) {
  ourddp::Options options;
  Parallel<Net> careless(Net(), job.group, options);
  const Tensor indices = at::arange(4);
  backward(careless, indices, false);
  expect_error<c10::Error>("second.weight", [&] { backward(careless, indices, false); });

  options.find_unused_parameters = true;
  Parallel<Net> model(Net(), job.group, options);
  for (int step = 0; step < 3; ++step) {
    backward(model, indices, false);
    TORCH_CHECK(!model.module()->second->weight.grad().defined(), "an unused parameter has no gradient");
  }
  backward(model, indices, job.rank == 0);
  expect_close("what rank 0 alone used", model.module()->second->bias.grad(), at::full({2}, 2.0));
}

torch::nn::Linear sum_of_inputs() {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  return net;
}

void accumulation(const Job& job) {
  ourddp::Options options;
  options.gradient_as_bucket_view = true;
  options.bucket_cap_mb = 0;  // chosen by the reducer
  Parallel<torch::nn::Linear> model(sum_of_inputs(), job.group, options);
  const Tensor& weight = model.module()->weight;
  const auto add = [&](double input) { model.forward(at::full({1, 1}, input)).sum().backward(); };
  for (int step = 0; step < 6; ++step) {
    weight.mutable_grad() = Tensor();
    {
      const auto quiet = model.no_sync();
      add(job.rank);
      expect_close("before the reduction", weight.grad(), at::full({1, 1}, static_cast<double>(job.rank)));
    }
    add(10);
    expect_close("after the reduction", weight.grad(), at::full({1, 1}, 10.5));
  }
}

void weights(const Job& job) {
  Parallel<torch::nn::Linear> model(sum_of_inputs(), job.group);
  const int64_t samples = 1 + 2 * job.rank;  // with the values 0 and 1 1 1
  model.set_weight(static_cast<double>(samples));
  model.forward(at::full({samples, 1}, static_cast<double>(job.rank))).sum().backward();
  expect_close("the mean over all samples", model.module()->weight.grad(), at::full({1, 1}, 0.75));
}

void misuse(const Job& job) {
  ourddp::Options options;
  options.bucket_cap_mb = -1;
  expect_error<c10::ValueError>("bucket_cap_mb is -1",
                                [&] { Parallel<torch::nn::Linear>(sum_of_inputs(), job.group, options); });
  expect_error<c10::ValueError>("needs a process group",
                                [&] { Parallel<torch::nn::Linear>(sum_of_inputs(), nullptr); });
  torch::nn::Linear frozen = sum_of_inputs();
  frozen->weight.set_requires_grad(false);
  expect_error<c10::Error>("any parameter that requires a gradient",
                           [&] { Parallel<torch::nn::Linear>(frozen, job.group); });
}

}  // namespace

int main() try {
  const Job job = ourddp::init(std::chrono::seconds(60));
  TORCH_CHECK(job.world_size == 2);
  parameters_buffers_and_sparse_gradients(job);
  unused_parameters(job);
  accumulation(job);
  weights(job);
  misuse(job);
  std::cout << "rank " << job.rank << " of " << job.launcher << ": all is well\n";
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << '\n';
  return 1;
}
