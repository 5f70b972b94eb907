#include "reducer/comm_cost.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "common/interval.h"
#include "reducer/comm_hooks.h"

namespace ours {
namespace {

constexpr int64_t kProbeBytes[] = {4 << 10, 64 << 10, 1 << 20, 4 << 20};
/// The least of these counts: what disturbs a measurement makes it longer. The first ones set things up.
constexpr int kRepetitions = 10;

/// Nanoseconds of one reduction of `tensor`, as the caller sees it.
double time_of_reduction(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  const int64_t began = steady_ns();
  start_all_reduce(group, {tensor}, c10d::ReduceOp::SUM)->wait();
  // An accelerator has only been told what to do: reading a number waits for it.
  if (!tensor.is_cpu()) tensor[0].item();
  return static_cast<double>(std::max<int64_t>(steady_ns() - began, 1));
}

}  // namespace

CommCost measure_comm_cost(c10d::ProcessGroup& group, c10::Device device) {
  const auto options = at::TensorOptions().dtype(at::kFloat).device(device);
  std::vector<float> times;
  for (const int64_t bytes : kProbeBytes) {
    const at::Tensor tensor = at::zeros({bytes / static_cast<int64_t>(sizeof(float))}, options);
    double least = std::numeric_limits<double>::max();
    for (int i = 0; i < kRepetitions; ++i) least = std::min(least, time_of_reduction(group, tensor));
    times.push_back(static_cast<float>(least));
  }
  const at::Tensor slowest = at::tensor(times).to(device);
  start_all_reduce(group, {slowest}, c10d::ReduceOp::MAX)->wait();
  const at::Tensor agreed = slowest.cpu();
  std::vector<CommSample> samples;
  for (size_t i = 0; i < times.size(); ++i) {
    samples.push_back({kProbeBytes[i], static_cast<double>(agreed.const_data_ptr<float>()[i])});
  }
  return fit_cost(samples);
}

}  // namespace ours
