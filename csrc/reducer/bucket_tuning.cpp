#include "reducer/bucket_tuning.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/error.h"

namespace ours {
namespace {

constexpr int64_t kSmallestCap = 64 * 1024;
constexpr double kAsGood = 1.02;

double reduction_ns(const std::vector<size_t>& bucket, const BackwardProfile& profile, const CommCost& cost) {
  int64_t bytes = 0;
  for (const size_t index : bucket) bytes += profile.gradients[index].bytes;
  return cost.latency_ns + static_cast<double>(bytes) * cost.ns_per_byte;
}

int64_t total_bytes(const std::vector<GradientInfo>& gradients) {
  int64_t total = 0;
  for (const GradientInfo& gradient : gradients) total += gradient.bytes;
  return total;
}

}  // namespace

CommCost fit_cost(const std::vector<CommSample>& samples) {
  // The normal equations for the least squares of (latency + bytes * rate) / ns - 1.
  double ww = 0;
  double wx = 0;
  double xx = 0;
  double w = 0;
  double x = 0;
  for (const CommSample& sample : samples) {
    if (!(sample.ns > 0)) {
      throw InvalidArgument("fit_cost: a reduction of " + std::to_string(sample.bytes) + " bytes took " +
                            std::to_string(sample.ns) + " ns; times must be positive");
    }
    const double weight = 1 / sample.ns;
    const double scaled = static_cast<double>(sample.bytes) / sample.ns;
    ww += weight * weight;
    wx += weight * scaled;
    xx += scaled * scaled;
    w += weight;
    x += scaled;
  }
  const bool two_sizes = std::any_of(samples.begin(), samples.end(),
                                     [&](const CommSample& sample) { return sample.bytes != samples.front().bytes; });
  if (!two_sizes) throw InvalidArgument("fit_cost needs reductions of at least two sizes");
  const double determinant = (ww * xx) - (wx * wx);
  CommCost cost;
  cost.latency_ns = ((w * xx) - (x * wx)) / determinant;
  cost.ns_per_byte = ((x * ww) - (w * wx)) / determinant;
  // If one part would be negative, the other explains the times alone.
  if (cost.latency_ns < 0) {
    cost.latency_ns = 0;
    cost.ns_per_byte = x / xx;
  } else if (cost.ns_per_byte < 0) {
    cost.latency_ns = w / ww;
    cost.ns_per_byte = 0;
  }
  return cost;
}

BackwardProfile even_profile(std::vector<GradientInfo> gradients, std::vector<size_t> order, const CommCost& cost) {
  BackwardProfile profile{std::move(gradients), std::move(order), {}};
  profile.arrival_ns.resize(profile.gradients.size());
  int64_t bytes = 0;
  for (const size_t index : profile.order) {
    bytes += profile.gradients.at(index).bytes;
    profile.arrival_ns[index] = static_cast<double>(bytes) * cost.ns_per_byte;
  }
  return profile;
}

double exposed_ns(const Buckets& buckets, const BackwardProfile& profile, const CommCost& cost) {
  double computed = 0;
  double free = 0;
  for (const auto& bucket : buckets) {
    for (const size_t index : bucket) computed = std::max(computed, profile.arrival_ns.at(index));
    // A bucket can start when its gradients have been computed, and those of the buckets before it.
    free = std::max(free, computed) + reduction_ns(bucket, profile, cost);
  }
  return std::max(0.0, free - computed);
}

double added_ns(const Buckets& buckets, const BackwardProfile& profile, const CommCost& cost) {
  double all = 0;
  for (const auto& bucket : buckets) all += reduction_ns(bucket, profile, cost);
  const double exposed = exposed_ns(buckets, profile, cost);
  return exposed + cost.slowdown * (all - exposed) + static_cast<double>(buckets.size()) * cost.latency_ns;
}

BucketCaps choose_caps(const BackwardProfile& profile, const CommCost& cost, int64_t first_cap) {
  const int64_t total = total_bytes(profile.gradients);
  BucketCaps best;
  double best_ns = 0;
  for (int64_t cap = kSmallestCap;; cap *= 2) {
    const BucketCaps caps{std::min(first_cap, cap), cap};
    const auto buckets = assign_buckets(profile.gradients, {caps.first, caps.others}, profile.order);
    const double ns = added_ns(buckets, profile, cost);
    if (best.others == 0 || ns <= best_ns * kAsGood) {
      best_ns = best.others == 0 ? ns : std::min(best_ns, ns);
      best = caps;
    }
    if (cap >= total) return best;
  }
}

}  // namespace ours
