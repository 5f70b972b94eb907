#include <algorithm>

#include "reducer/comm_cost.h"
#include "reducer/reducer.h"

// How Reducer finds the size of its buckets, where it is asked to.

namespace ours {
namespace {

/// The first backwards set up memory and caches; what the next ones take is what later ones will.
constexpr int64_t kBackwardsBeforeTuning = 3;

}  // namespace

void Reducer::measure_group() {
  if (!options_.tune_bucket_size) return;
  tuning_.enabled = true;
  tuning_.cost = measure_comm_cost(*group_, parameters_.front().device());
  tuning_.backwards_left = kBackwardsBeforeTuning;
}

void Reducer::tune(const std::vector<size_t>& order) {
  std::vector<GradientInfo> gradients = gradient_infos(parameters_, options_.expect_sparse_gradients);
  BackwardProfile profile;
  // A rank that ran out of input before it computed a gradient has seen nothing.
  if (last_backward_.iteration > 0) {
    profile = {std::move(gradients), order, {arrival_ns_.begin(), arrival_ns_.end()}};
  } else {
    profile = even_profile(std::move(gradients), order, tuning_.cost);
  }
  tuning_.caps = choose_caps(profile, tuning_.cost, options_.first_bucket_bytes_cap);
}

std::vector<int64_t> Reducer::bucket_caps() const {
  if (!options_.bucket_bytes_cap_list.empty()) return options_.bucket_bytes_cap_list;
  if (tuning_.settled()) return {tuning_.caps.first, tuning_.caps.others};
  return {options_.first_bucket_bytes_cap, options_.bucket_bytes_cap};
}

void Reducer::count_backward_for_tuning() {
  if (tuning_.backwards_left > 0) --tuning_.backwards_left;
}

BucketTuning Reducer::tuning() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return tuning_;
}

}  // namespace ours
