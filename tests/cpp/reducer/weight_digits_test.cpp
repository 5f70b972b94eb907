#include "reducer/weight_digits.h"

#include <cmath>
#include <random>

#include "support/testing.h"

namespace ours::testing {
namespace {

struct Numbers {
  int significant_bits;
  int ranks;
};

const std::vector<Numbers> kNumbers = {{53, 1},  {53, 2}, {53, 1000}, {24, 1}, {24, 3},  {24, 64},   {11, 2},
                                       {11, 65}, {8, 1},  {8, 2},     {8, 5},  {8, 256}, {24, 4096}, {11, 2048}};

/// Whether a number of this many significant bits is equal to `value`.
bool representable(double value, int significant_bits) {
  int exponent = 0;
  const double scaled = std::ldexp(std::frexp(value, &exponent), significant_bits);
  return scaled == std::floor(scaled);
}

/// Adds up what all ranks send, in numbers of few bits: each sum on the way has to be exact.
WeightSum sum_over_ranks(const Numbers& numbers, const std::vector<std::optional<double>>& weights) {
  const WeightDigits digits(numbers.significant_bits, numbers.ranks);
  CHECK(digits.possible());
  std::vector<double> sums(static_cast<size_t>(digits.size()), 0.0);
  for (const auto& weight : weights) {
    const std::vector<double> sent = digits.encode(weight);
    CHECK_EQ(sent.size(), sums.size());
    for (size_t i = 0; i < sums.size(); ++i) {
      sums[i] += sent[i];
      CHECK(representable(sums[i], numbers.significant_bits));
    }
  }
  return digits.decode(sums);
}

TEST(sums_of_integers_are_exact) {
  std::mt19937_64 random(1);
  for (const Numbers& numbers : kNumbers) {
    for (int round = 0; round < 50; ++round) {
      std::vector<std::optional<double>> weights;
      double total = 0;
      for (int rank = 0; rank < numbers.ranks; ++rank) {
        weights.emplace_back(static_cast<double>(random() >> (24 + random() % 40)));
        total += *weights.back();
      }
      const WeightSum sum = sum_over_ranks(numbers, weights);
      CHECK_EQ(sum.with, numbers.ranks);
      CHECK_EQ(sum.without, 0);
      CHECK(sum.total == total);
    }
  }
}

TEST(sums_of_any_numbers_are_right_to_nine_digits) {
  std::mt19937_64 random(2);
  std::uniform_real_distribution<double> exponents(-32, 63);
  for (const Numbers& numbers : kNumbers) {
    for (int round = 0; round < 50; ++round) {
      std::vector<std::optional<double>> weights;
      double total = 0;
      for (int rank = 0; rank < numbers.ranks; ++rank) {
        weights.emplace_back(std::exp2(exponents(random)));
        total += *weights.back();
      }
      CHECK(std::abs(sum_over_ranks(numbers, weights).total / total - 1) < 1e-9);
    }
  }
}

TEST(the_ends_of_the_range_can_be_sent_by_all_ranks) {
  for (const Numbers& numbers : kNumbers) {
    for (const double weight : {0.0, kLeastWeight, 1.0, kMostWeight}) {
      const std::vector<std::optional<double>> weights(static_cast<size_t>(numbers.ranks), weight);
      CHECK(sum_over_ranks(numbers, weights).total == weight * numbers.ranks);
    }
  }
}

TEST(ranks_without_a_weight_are_counted_and_others_are_not) {
  // The fourth rank has no part.
  const WeightSum sum = sum_over_ranks({24, 4}, {3.5, std::nullopt, 0.0});
  CHECK_EQ(sum.with, 2);
  CHECK_EQ(sum.without, 1);
  CHECK(sum.total == 3.5);
}

TEST(numbers_that_cannot_count_the_ranks_are_refused) {
  CHECK(WeightDigits(8, 256).possible());
  CHECK(!WeightDigits(8, 257).possible());
  CHECK(!WeightDigits(0, 2).possible());
  // The carrier grows by little.
  CHECK_EQ(WeightDigits(24, 8).size(), 9);
  CHECK_EQ(WeightDigits(8, 256).size(), 130);
}

}  // namespace
}  // namespace ours::testing
