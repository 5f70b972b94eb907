// Trains the network of examples/train.py on the same digits, data-parallel and without Python:
//
//     python examples/cpp/digits.py digits.csv
//     cmake -S examples/cpp -B build-cpp -DCMAKE_PREFIX_PATH="$(python -m ourddp cmake-prefix)"
//     cmake --build build-cpp
//     torchrun --no-python --nproc_per_node=4 build-cpp/train digits.csv
//     mpirun -n 4 build-cpp/train digits.csv
//
// With the same number of ranks it takes the same steps, from the same first weights, over the same batches as
// examples/train.py, so it ends with the same accuracy. docs/training.md explains the learning rate.

#include <ourddp/ourddp.h>
#include <sched.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int64_t kPixels = 64;
constexpr int64_t kBatch = 16;  // samples of a rank and step
constexpr double kRate = 0.04;  // the learning rate for a batch of that size
constexpr int64_t kWarmUp = 3;  // epochs
constexpr uint64_t kSeed = 0;

struct Digits {
  torch::Tensor images;  // (N, 1, 8, 8), from 0 to 1
  torch::Tensor labels;  // (N)

  Digits at(const torch::Tensor& indices) const { return {images.index({indices}), labels.index({indices})}; }
  int64_t size() const { return labels.size(0); }
};

Digits read_digits(const std::string& path) {
  std::ifstream file(path);
  std::vector<int64_t> numbers;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    for (std::string field; std::getline(fields, field, ',');) numbers.push_back(std::stoll(field));
  }
  const auto count = static_cast<int64_t>(numbers.size());
  TORCH_CHECK(count > 0 && count % (kPixels + 1) == 0, "cannot read digits from ", path,
              ": write the file with python examples/cpp/digits.py ", path);
  const torch::Tensor rows = torch::tensor(numbers).view({-1, kPixels + 1});
  const torch::Tensor pixels = rows.slice(1, 0, kPixels).to(torch::kFloat).view({-1, 1, 8, 8});
  return {pixels / 16, rows.select(1, kPixels).clone()};
}

/// The numbers below `count` in the random order that Python's torch gives for the seed.
torch::Tensor permutation(int64_t count, uint64_t seed) {
  return torch::randperm(count, torch::make_generator<torch::CPUGeneratorImpl>(seed), torch::kLong);
}

/// The samples of this rank in an epoch. Ranks get equally many, the first samples twice if need be.
torch::Tensor share_of(const ourddp::Job& job, int64_t count, int64_t epoch) {
  const torch::Tensor order = permutation(count, kSeed + static_cast<uint64_t>(epoch));
  const int64_t missing = (job.world_size - count % job.world_size) % job.world_size;
  return torch::cat({order, order.slice(0, 0, missing)}).slice(0, job.rank, c10::nullopt, job.world_size);
}

torch::nn::Sequential make_model(int64_t hidden) {
  namespace nn = torch::nn;
  // One statement for each layer: a compiler may evaluate arguments in any order, and each layer draws its weights.
  nn::Sequential net;
  net->push_back(nn::Conv2d(nn::Conv2dOptions(1, 32, 3).padding(1)));
  net->push_back(nn::ReLU());
  net->push_back(nn::Conv2d(nn::Conv2dOptions(32, 64, 3).padding(1)));
  net->push_back(nn::ReLU());
  net->push_back(nn::MaxPool2d(2));
  net->push_back(nn::Flatten());
  net->push_back(nn::Dropout(0.25));
  net->push_back(nn::Linear(64 * 4 * 4, hidden));
  net->push_back(nn::ReLU());
  net->push_back(nn::Linear(hidden, 10));
  return net;
}

/// The rate rises with the batch of all ranks; it starts low, and falls to 0 under a cosine.
double learning_rate(int64_t step, int64_t steps, int64_t steps_of_epoch, int ranks) {
  const double peak = kRate * ranks;
  const double warm_up = static_cast<double>(kWarmUp * steps_of_epoch);
  const double risen = kRate + (peak - kRate) * std::min(1.0, static_cast<double>(step) / warm_up);
  return risen * 0.5 * (1 + std::cos(M_PI * static_cast<double>(step) / static_cast<double>(steps)));
}

/// The sum over all ranks.
torch::Tensor sum_over_ranks(const ourddp::Job& job, const torch::Tensor& own) {
  std::vector<torch::Tensor> sums{own.clone()};
  job.group->allreduce(sums)->wait();
  return sums[0];
}

/// The share of the held-out digits that the model recognises. Each rank looks at its part of them.
double accuracy(torch::nn::Sequential& model, const Digits& held_out, const ourddp::Job& job) {
  const torch::NoGradGuard no_grad;
  model->eval();
  const Digits own = held_out.at(torch::arange(job.rank, held_out.size(), job.world_size));
  const torch::Tensor correct = model->forward(own.images).argmax(-1).eq(own.labels).sum();
  return static_cast<double>(sum_over_ranks(job, correct).item<int64_t>()) / static_cast<double>(held_out.size());
}

/// Whether the parameters of all ranks have the same bits.
bool parameters_are_equal(torch::nn::Sequential& model, const ourddp::Job& job) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::Tensor> flat;
  for (const torch::Tensor& parameter : model->parameters()) flat.push_back(parameter.flatten());
  const torch::Tensor own = torch::cat(flat).view(torch::kInt);  // as integers, since -0.0 equals 0.0
  std::vector<torch::Tensor> first{own.clone()};
  job.group->broadcast(first)->wait();
  return sum_over_ranks(job, (own != first[0]).sum()).item<int64_t>() == 0;
}

void train(const ourddp::Job& job, const Digits& digits, int64_t epochs, int64_t hidden) {
  const torch::Tensor order = permutation(digits.size(), kSeed);
  const int64_t held_out_size = digits.size() / 5;
  const Digits held_out = digits.at(order.slice(0, 0, held_out_size));
  const Digits training = digits.at(order.slice(0, held_out_size));

  torch::manual_seed(kSeed);
  torch::nn::Sequential net = make_model(hidden);
  ourddp::DistributedDataParallel model(net, job.group);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(kRate).momentum(0.9));

  const int64_t share = (training.size() + job.world_size - 1) / job.world_size;
  const int64_t steps_of_epoch = (share + kBatch - 1) / kBatch;
  int64_t step = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    torch::manual_seed((kSeed * 1000003 + static_cast<uint64_t>(epoch)) * 1000003 + static_cast<uint64_t>(job.rank));
    torch::empty({}, torch::kLong).random_();  // Python's DataLoader takes a number here, too
    net->train();
    double loss_of_all = 0;
    for (const torch::Tensor& indices : share_of(job, training.size(), epoch).split(kBatch)) {
      const double rate = learning_rate(step++, epochs * steps_of_epoch, steps_of_epoch, job.world_size);
      static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options()).lr(rate);
      const Digits batch = training.at(indices);
      optimizer.zero_grad();
      const torch::Tensor loss = torch::nn::functional::cross_entropy(model.forward(batch.images), batch.labels);
      loss.backward();
      optimizer.step();
      loss_of_all += loss.item<double>() * static_cast<double>(batch.size());
    }
    loss_of_all = sum_over_ranks(job, torch::tensor(loss_of_all, torch::kDouble)).item<double>();
    const double recognised = accuracy(net, held_out, job);
    if (job.rank == 0) {
      std::printf("epoch %3d  loss %.4f  held-out accuracy %6.2f%%\n", static_cast<int>(epoch + 1),
                  loss_of_all / static_cast<double>(share * job.world_size), 100 * recognised);
      std::fflush(stdout);
    }
  }
  TORCH_CHECK(parameters_are_equal(net, job), "the parameters of the ranks differ");
  if (job.rank == 0) std::cout << "the parameters of all " << job.world_size << " ranks are equal, bit by bit\n";
}

/// More threads than cores would make every rank wait for the others' threads.
void share_cores(const ourddp::Job& job) {
  cpu_set_t usable;
  const int cores = sched_getaffinity(0, sizeof(usable), &usable) == 0 ? CPU_COUNT(&usable) : 1;
  torch::set_num_threads(std::max(1, cores / job.local_world_size));
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 2 || argc > 4) {
    std::cerr << "usage: " << argv[0] << " DIGITS.csv [EPOCHS [WIDTH OF THE HIDDEN LAYER]]\n";
    return 2;
  }
  const Digits digits = read_digits(argv[1]);
  const int64_t epochs = argc > 2 ? std::max(1, std::atoi(argv[2])) : 15;
  const int64_t hidden = argc > 3 ? std::max(1, std::atoi(argv[3])) : 128;
  const ourddp::Job job = ourddp::init();
  share_cores(job);
  train(job, digits, epochs, hidden);
} catch (const c10::Error& error) {
  std::cerr << error.what_without_backtrace() << '\n';
  return 1;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
