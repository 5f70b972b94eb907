#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace ours {

/// The range of weights besides 0. A weight travels as a fixed-point number of 128 bits, half of them after the point,
/// so that even the least one keeps 32 significant bits.
constexpr double kLeastWeight = 1.0 / (int64_t{1} << 32);
constexpr double kMostWeight = 9223372036854775808.0;  // 2^63

/// What the weights of all ranks add up to.
struct WeightSum {
  int64_t with = 0;     ///< ranks that have set a weight
  int64_t without = 0;  ///< ranks that take part and have set none
  double total = 0;     ///< of all weights
};

/// Writes a weight in numbers that a reduction can add up exactly, even if they have few significant bits.
///
/// The fixed-point number is cut into digits, which are so small that a sum of them over all ranks is an integer that
/// the numbers can represent. Nothing is carried from a digit to the next one until the sums are decoded. Two more
/// numbers count the ranks with a weight and those without one. A rank of which all numbers are 0 has no part.
class WeightDigits {
 public:
  /// For numbers of `significant_bits`, the leading one that is not stored included, added up over `ranks` ranks.
  WeightDigits(int significant_bits, int ranks);

  /// Whether the numbers can represent the sum of a single bit over all ranks.
  bool possible() const { return bits_ > 0; }
  /// How many numbers encode() returns and decode() takes. Only if it is possible.
  int64_t size() const;
  /// `weight` is 0 or within the range above; without one the rank is counted as having none.
  std::vector<double> encode(std::optional<double> weight) const;
  /// `sums` are those of what encode() returned on each rank. The total of integers below 2^53 is exact.
  WeightSum decode(const std::vector<double>& sums) const;

 private:
  int digits() const;

  int bits_ = 0;  ///< in a digit
};

}  // namespace ours
