#include "collectives/node/faster_way.h"

#include <algorithm>
#include <chrono>

namespace ours {

namespace {

/// The calls between two tries of the slower way grow up to these if it is no slower, and up to kMostTimes as many if
/// it is that much slower.
constexpr double kTryEvery = 64;
constexpr double kMostTimes = 16;

}  // namespace

size_t size_class(size_t bytes, size_t least, size_t classes) {
  size_t number = 0;
  while (number + 1 < classes && bytes >> (number + 1) >= least) ++number;
  return number;
}

double FasterWay::Costs::cheapest() const { return *std::min_element(ns.begin(), ns.begin() + std::min(known, kKept)); }

bool FasterWay::next() {
  const uint64_t call = calls_++;
  // Twice the second way, then twice the first. A program's calls hardly follow that order.
  if (call < 4) return call < 2;
  // A call that failed has told nothing.
  if (costs_[0].known == 0 || costs_[1].known == 0) return costs_[1].known == 0;
  const double first = costs_[0].cheapest(), second = costs_[1].cheapest();
  const bool faster = second < first;
  if (call < next_try_) return faster;
  const bool tries = next_try_ != 0;  // otherwise both have just been tried
  const double times = std::min(std::max(first, second) / std::min(first, second), kMostTimes);
  next_try_ = call + (static_cast<uint64_t>(between_tries_ * times) | 1);  // odd, for the same reason
  between_tries_ = std::min(2 * between_tries_, kTryEvery);
  return tries ? !faster : faster;
}

void FasterWay::took(bool second, Clock::duration time, size_t work) {
  Costs& costs = costs_[second ? 1 : 0];
  const double ns = std::chrono::duration<double, std::nano>(time).count();
  costs.ns[costs.known++ % kKept] = std::max(ns, 1.0) / static_cast<double>(work);
}

}  // namespace ours
