#include "reducer/bucket_tuning.h"

#include <cmath>

#include "common/error.h"
#include "reducer/random_models.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

std::vector<size_t> natural_order(size_t count) {
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  return order;
}

BackwardProfile profile_of(std::vector<GradientInfo> gradients, std::vector<double> arrivals) {
  std::vector<size_t> order = natural_order(gradients.size());
  return {std::move(gradients), std::move(order), std::move(arrivals)};
}

BackwardProfile even(std::vector<GradientInfo> gradients, const CommCost& cost) {
  std::vector<size_t> order = natural_order(gradients.size());
  return even_profile(std::move(gradients), std::move(order), cost);
}

/// 64 gradients of 1 MiB that take 0.1 s each to compute.
BackwardProfile slow_computation() {
  std::vector<double> arrivals;
  for (int i = 1; i <= 64; ++i) arrivals.push_back(1e8 * i);
  return profile_of(std::vector<GradientInfo>(64, {kMiB}), std::move(arrivals));
}

bool near(double value, double expected) { return std::abs(value - expected) <= 1e-6 * expected; }

TEST(the_cost_is_read_off_a_line) {
  const double rate = 0.3;
  const CommCost cost =
      fit_cost({{4096, 50'000 + rate * 4096}, {kMiB, 50'000 + rate * kMiB}, {4 * kMiB, 50'000 + 4 * rate * kMiB}});
  CHECK(near(cost.latency_ns, 50'000));
  CHECK(near(cost.ns_per_byte, rate));
}

TEST(neither_part_of_the_cost_is_negative) {
  const CommCost faster_when_larger = fit_cost({{4096, 2000.0}, {kMiB, 1000.0}});
  CHECK_EQ(faster_when_larger.ns_per_byte, 0.0);
  CHECK(faster_when_larger.latency_ns >= 1000 && faster_when_larger.latency_ns <= 2000);
  const CommCost worse_than_linear = fit_cost({{1000, 1000.0}, {10'000, 20'000.0}});
  CHECK_EQ(worse_than_linear.latency_ns, 0.0);
  CHECK(worse_than_linear.ns_per_byte >= 1 && worse_than_linear.ns_per_byte <= 2);
}

TEST(a_cost_needs_two_sizes_and_positive_times) {
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, fit_cost({})), "two sizes");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, fit_cost({{4096, 10.0}})), "two sizes");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, fit_cost({{4096, 10.0}, {4096, 12.0}})), "two sizes");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, fit_cost({{4096, 10.0}, {8192, 0.0}})), "positive");
}

TEST(reductions_follow_each_other) {
  const CommCost cost{10, 1};
  const std::vector<GradientInfo> three(3, {100});
  const BackwardProfile profile = profile_of(three, {50, 100, 300});
  // 50-160, 160-270 as the line is busy, 300-410
  CHECK_EQ(exposed_ns({{0}, {1}, {2}}, profile, cost), 110.0);
  // 100-310, 310-420
  CHECK_EQ(exposed_ns({{0, 1}, {2}}, profile, cost), 120.0);
  CHECK_EQ(exposed_ns({{0, 1, 2}}, profile, cost), 310.0);
  // Gradients that arrive evenly do so at 100, 200, 300.
  CHECK_EQ(exposed_ns({{0}, {1}, {2}}, even(three, cost), cost), 130.0);
  CHECK_EQ(exposed_ns({}, even({}, cost), cost), 0.0);
}

TEST(latency_asks_for_large_buckets_and_bandwidth_for_small_ones) {
  const std::vector<GradientInfo> model(1024, {64 * kKiB});
  const auto caps_for = [&](const CommCost& cost) { return choose_caps(even(model, cost), cost, kMiB); };
  CHECK_EQ(caps_for({0, 0.3}).others, 64 * kKiB);
  CHECK_EQ(caps_for({0, 0.3}).first, 64 * kKiB);
  CHECK_EQ(caps_for({1e9, 0.3}).others, 64 * kMiB);
  CHECK_EQ(caps_for({1e9, 0.3}).first, kMiB);
  // Between the two, each bucket costs its latency, and the last one its bytes too: the sum is least near this size.
  const auto cap = static_cast<double>(caps_for({50'000, 0.3}).others);
  const double best = std::sqrt(64.0 * kMiB * 50'000 / 0.3);
  CHECK(best / 2 < cap && cap < best * 2);
}

TEST(a_computation_that_hides_everything_needs_few_reductions) {
  // What is exposed is the last bucket alone, of 0.1 ms for each MiB; each bucket costs 0.1 ms.
  const int64_t cap = choose_caps(slow_computation(), {100'000, 0.1}, kMiB).others;
  CHECK(cap == 4 * kMiB || cap == 8 * kMiB || cap == 16 * kMiB);
}

TEST(small_buckets_gain_nothing_where_computation_pays_for_reductions) {
  const BucketCaps paid = choose_caps(slow_computation(), {100'000, 0.1, 1}, kMiB);
  CHECK_EQ(paid.first, kMiB);
  CHECK_EQ(paid.others, 64 * kMiB);
  // Where it pays for half of it, they still gain something.
  const int64_t half = choose_caps(slow_computation(), {100'000, 0.1, 0.5}, kMiB).others;
  CHECK(choose_caps(slow_computation(), {100'000, 0.1}, kMiB).others <= half && half < 64 * kMiB);
}

TEST(a_model_smaller_than_any_bucket_gets_one) {
  const CommCost cost{1000, 1};
  for (const size_t count : {size_t{3}, size_t{0}}) {
    const BucketCaps caps = choose_caps(even(std::vector<GradientInfo>(count, {8}), cost), cost, kMiB);
    CHECK_EQ(caps.first, 64 * kKiB);
    CHECK_EQ(caps.others, 64 * kKiB);
  }
}

TEST(no_other_cap_is_much_better) {
  RandomModels random;
  for (int i = 0; i < 100; ++i) {
    std::vector<GradientInfo> gradients(static_cast<size_t>(random.number(1, 30)));
    std::vector<double> arrivals;
    for (GradientInfo& gradient : gradients) {
      gradient.bytes = random.number(0, 4 * kMiB);
      arrivals.push_back((arrivals.empty() ? 0 : arrivals.back()) + static_cast<double>(random.number(0, 10'000'000)));
    }
    const CommCost cost{static_cast<double>(random.number(0, 10'000'000)),
                        static_cast<double>(random.number(0, 1000)) / 100,
                        static_cast<double>(random.number(0, 100)) / 100};
    const BackwardProfile profile = profile_of(gradients, arrivals);
    const auto step_with = [&](int64_t cap) {
      const auto buckets = assign_buckets(gradients, {std::min(kMiB, cap), cap}, profile.order);
      double bytes = 0;
      for (const GradientInfo& gradient : gradients) bytes += static_cast<double>(gradient.bytes);
      const double latency = static_cast<double>(buckets.size()) * cost.latency_ns;
      const double exposed = exposed_ns(buckets, profile, cost);
      return exposed + cost.slowdown * (latency + bytes * cost.ns_per_byte - exposed) + latency;
    };
    const BucketCaps chosen = choose_caps(profile, cost, kMiB);
    CHECK_EQ(chosen.first, std::min(kMiB, chosen.others));
    const double step = step_with(chosen.others);
    for (int64_t cap = 64 * kKiB; cap <= 128 * kMiB; cap *= 2) {
      CHECK(step <= 1.02 * step_with(cap) * (1 + 1e-9) + 1e-6);
    }
  }
}

}  // namespace
}  // namespace ours::testing
