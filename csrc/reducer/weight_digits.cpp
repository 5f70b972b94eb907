#include "reducer/weight_digits.h"

#include <algorithm>
#include <cmath>

namespace ours {
namespace {

constexpr int kHalfBits = 64;
constexpr int kBits = 2 * kHalfBits;
constexpr size_t kCounts = 2;
/// No digit is longer, so that it is made of at most two halves and always fits into 64 bits.
constexpr int kMostDigitBits = 32;

/// Returns bits `begin` to `begin + count` of the number with these halves.
uint64_t bits_of(uint64_t whole, uint64_t fraction, int begin, int count) {
  const uint64_t mask = (uint64_t{1} << count) - 1;
  if (begin >= kHalfBits) return (whole >> (begin - kHalfBits)) & mask;
  const uint64_t low = fraction >> begin;
  const uint64_t high = begin + count > kHalfBits ? whole << (kHalfBits - begin) : 0;
  return (low | high) & mask;
}

}  // namespace

WeightDigits::WeightDigits(int significant_bits, int ranks) {
  // All integers up to 2^significant_bits can be represented.
  const double most = std::ldexp(1.0, significant_bits);
  while (bits_ < kMostDigitBits && ranks * (std::ldexp(1.0, bits_ + 1) - 1) <= most) ++bits_;
}

int WeightDigits::digits() const { return (kBits + bits_ - 1) / bits_; }

int64_t WeightDigits::size() const { return static_cast<int64_t>(kCounts) + digits(); }

std::vector<double> WeightDigits::encode(std::optional<double> weight) const {
  std::vector<double> numbers{weight ? 1.0 : 0.0, weight ? 0.0 : 1.0};
  const double floor = std::floor(weight.value_or(0));
  const auto whole = static_cast<uint64_t>(floor);
  const auto fraction = static_cast<uint64_t>(std::ldexp(weight.value_or(0) - floor, kHalfBits));
  for (int digit = 0; digit < digits(); ++digit) {
    const int begin = digit * bits_;
    numbers.push_back(static_cast<double>(bits_of(whole, fraction, begin, std::min(bits_, kBits - begin))));
  }
  return numbers;
}

WeightSum WeightDigits::decode(const std::vector<double>& sums) const {
  WeightSum sum{std::llround(sums.at(0)), std::llround(sums.at(1)), 0};
  // From the most significant one on, as then sums of integers are integers all the way.
  int exponent = digits() * bits_ - kHalfBits;
  for (size_t number = sums.size(); number-- > kCounts;) sum.total += std::ldexp(sums[number], exponent -= bits_);
  return sum;
}

}  // namespace ours
