#include "reducer/bucket_plan.h"

#include <ATen/ops/tensor.h>

#include <numeric>
#include <utility>

#include "reducer/comm_cost.h"

namespace ours {
namespace {

/// The first backwards set up memory and caches, and take longer than later ones.
constexpr int64_t kBackwardsBeforeTuning = 3;

}  // namespace

std::vector<GradientInfo> gradient_infos(const std::vector<at::Tensor>& parameters, const std::vector<bool>& sparse) {
  std::vector<GradientInfo> infos;
  for (size_t index = 0; index < parameters.size(); ++index) {
    const at::Tensor& parameter = parameters[index];
    infos.push_back({static_cast<int64_t>(parameter.nbytes()), static_cast<int>(parameter.scalar_type()),
                     static_cast<int>(parameter.device().type()), parameter.device().index(),
                     !sparse.empty() && sparse.at(index)});
  }
  return infos;
}

BucketPlan::BucketPlan(const std::vector<at::Tensor>& parameters, const ReducerOptions& options,
                       c10d::ProcessGroup& group)
    : parameters_(parameters), options_(options), may_rebuild_(!options.find_unused_parameters) {
  if (!options.tune_bucket_size) return;
  tuning_.enabled = true;
  tuning_.cost = measure_comm_cost(group, parameters.front().device());
  tuning_.backwards_left = kBackwardsBeforeTuning;
}

Buckets BucketPlan::first_buckets() {
  if (!options_.bucket_indices.empty()) {
    std::vector<size_t> all;
    for (const auto& bucket : options_.bucket_indices) all.insert(all.end(), bucket.begin(), bucket.end());
    check_permutation(all, parameters_.size());
    return options_.bucket_indices;
  }
  // Gradients are likely to arrive in the reverse order of the parameters.
  std::vector<size_t> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  if (tuning_.enabled) choose_size(order, {});
  return assign(order, caps());
}

void BucketPlan::begin_backward() {
  // While more backwards are to be seen, only the last one's order counts.
  if (tuning_.backwards_left > 0) order_.clear();
}

void BucketPlan::end_backward() {
  if (tuning_.backwards_left > 0) --tuning_.backwards_left;
}

void BucketPlan::skip_backward() {
  if (!rebuilds()) return;
  end_backward();
  order_.resize(parameters_.size());
  std::iota(order_.begin(), order_.end(), size_t{0});
}

Buckets BucketPlan::rebuild(c10d::ProcessGroup& group, const std::vector<int64_t>& arrival_ns) {
  if (tuning_.enabled) choose_size(order_, arrival_ns);
  // Orders of arrival differ between ranks by chance, but all must reduce the same buckets.
  std::vector<int64_t> decision(order_.begin(), order_.end());
  decision.insert(decision.end(), {caps().first, caps().others});
  std::vector<at::Tensor> tensors{at::tensor(decision, at::kLong).to(parameters_.front().device())};
  group.broadcast(tensors)->wait();
  const at::Tensor received = tensors.front().cpu();
  const auto* order = received.const_data_ptr<int64_t>();
  const int64_t* caps = order + parameters_.size();
  if (tuning_.enabled) tuning_.caps = {caps[0], caps[1]};
  has_rebuilt_ = true;
  order_.clear();
  return assign({order, caps}, {caps[0], caps[1]});
}

void BucketPlan::start_anew() {
  has_rebuilt_ = false;
  order_.clear();
}

void BucketPlan::choose_size(const std::vector<size_t>& order, const std::vector<int64_t>& arrival_ns) {
  std::vector<GradientInfo> gradients = gradient_infos(parameters_, options_.expect_sparse_gradients);
  const BackwardProfile profile =
      arrival_ns.empty() ? even_profile(std::move(gradients), order, tuning_.cost)
                         : BackwardProfile{std::move(gradients), order, {arrival_ns.begin(), arrival_ns.end()}};
  tuning_.caps = choose_caps(profile, tuning_.cost, options_.first_bucket_bytes_cap);
}

BucketCaps BucketPlan::caps() const {
  return tuning_.settled() ? tuning_.caps : BucketCaps{options_.first_bucket_bytes_cap, options_.bucket_bytes_cap};
}

Buckets BucketPlan::assign(const std::vector<size_t>& order, const BucketCaps& caps) const {
  const std::vector<int64_t>& given = options_.bucket_bytes_cap_list;
  return assign_buckets(gradient_infos(parameters_, options_.expect_sparse_gradients),
                        given.empty() ? std::vector<int64_t>{caps.first, caps.others} : given, order);
}

}  // namespace ours
