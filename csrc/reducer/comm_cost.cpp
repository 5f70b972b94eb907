#include "reducer/comm_cost.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "common/interval.h"
#include "reducer/group_reductions.h"

namespace ours {
namespace {

constexpr int64_t kProbeBytes[] = {4 << 10, 64 << 10, 1 << 20, 4 << 20};
/// The shortest of this many counts, because disturbances only make a measurement longer. The first ones set things
/// up.
constexpr int kRepetitions = 10;

constexpr int64_t kProbeWidth = 256;
constexpr int kOverlaps = 7;

/// Waits for an accelerator by reading a number, since it has only been told what to do so far.
void finish(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) tensor.flatten()[0].item();
}

/// Returns the nanoseconds that one reduction of `tensor` takes for its caller.
double time_of_reduction(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  const int64_t began = steady_ns();
  start_all_reduce(group, {tensor}, c10d::ReduceOp::SUM)->wait();
  finish(tensor);
  return static_cast<double>(std::max<int64_t>(steady_ns() - began, 1));
}

double middle(std::vector<double> values) {
  const auto half = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), half, values.end());
  return *half;
}

/// Runs a reduction of `tensor`, which takes `alone_ns` by itself, on all ranks at once, beside a computation of
/// about twice that time. Returns the share of the reduction's time, 0 to 1, that this does not save.
double measure_slowdown(c10d::ProcessGroup& group, const at::Tensor& tensor, double alone_ns) {
  const at::Tensor matrix = at::zeros({kProbeWidth, kProbeWidth}, tensor.options());
  const at::Tensor start = at::zeros({1}, tensor.options());
  const auto time = [&](const auto& action) {
    time_of_reduction(group, start);
    const int64_t began = steady_ns();
    action();
    return static_cast<double>(std::max<int64_t>(steady_ns() - began, 1));
  };
  int products = 1;
  const auto compute = [&] {
    for (int i = 0; i < products; ++i) at::mm(matrix, matrix);
    finish(matrix);
  };
  time(compute);
  const double product_ns = time(compute);
  products = static_cast<int>(std::clamp(2 * alone_ns / product_ns, 1.0, 1e4));
  std::vector<double> apart;
  std::vector<double> together;
  for (int i = 0; i < kOverlaps; ++i) {
    apart.push_back(time(compute) + time_of_reduction(group, tensor));
    together.push_back(time([&] {
      const auto work = start_all_reduce(group, {tensor}, c10d::ReduceOp::SUM);
      compute();
      work->wait();
      finish(tensor);
    }));
  }
  return 1 - std::clamp((middle(apart) - middle(together)) / alone_ns, 0.0, 1.0);
}

}  // namespace

CommCost measure_comm_cost(c10d::ProcessGroup& group, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  std::vector<float> times;
  at::Tensor tensor;
  for (const int64_t bytes : kProbeBytes) {
    tensor = at::zeros({bytes / static_cast<int64_t>(sizeof(float))}, options);
    double least = std::numeric_limits<double>::max();
    for (int i = 0; i < kRepetitions; ++i) least = std::min(least, time_of_reduction(group, tensor));
    times.push_back(static_cast<float>(least));
  }
  times.push_back(static_cast<float>(measure_slowdown(group, tensor, times.back())));
  const at::Tensor slowest = at::tensor(times).to(device);
  start_all_reduce(group, {slowest}, c10d::ReduceOp::MAX)->wait();
  const at::Tensor agreed = slowest.cpu();
  const auto* const values = agreed.const_data_ptr<float>();
  std::vector<CommSample> samples;
  for (const int64_t bytes : kProbeBytes) samples.push_back({bytes, static_cast<double>(values[samples.size()])});
  CommCost cost = fit_cost(samples);
  cost.slowdown = static_cast<double>(values[samples.size()]);
  return cost;
}

}  // namespace ours
