#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>

#include "collectives/straggler_ledger.h"

// What the straggler ledger costs a call: reading when the ranks of a node arrived, of which the last one changes, and
// taking in the call and the wait for it.
// Usage: ledger

namespace {

using ours::Clock;
using ours::StragglerLedger;

/// Nanoseconds of a call in a group of that size, the best of several batches, so that other load counts little.
double cost(int ranks) {
  constexpr int kCalls = 20'000;
  StragglerLedger ledger(0, ranks);
  const auto now = Clock::now();
  const auto at = [&](uint64_t call) { return now + std::chrono::milliseconds(call); };
  uint64_t call = 0;
  double best = 1e9;
  for (int batch = 0; batch < 20; ++batch) {
    const auto begin = Clock::now();
    for (int i = 0; i < kCalls; ++i) {
      ++call;
      const ours::SinceCall since_call(at(call), Clock::now());
      ours::Arrivals& arrivals = ledger.begin();
      for (int r = 1; r < ranks; ++r) {
        const auto written = static_cast<uint32_t>(ours::steady_us(at(call)));
        arrivals.note(r, since_call(written) + (r == static_cast<int>(call % ranks) ? 90 : r));
      }
      ledger.add({at(call), at(call) + std::chrono::microseconds(100), 4});
      ledger.waited(std::chrono::microseconds(100), call);
    }
    const double ns = std::chrono::duration<double, std::nano>(Clock::now() - begin).count();
    best = std::min(best, ns / kCalls);
  }
  return best;
}

}  // namespace

int main() {
  std::printf("the straggler ledger, for each collective\n");
  for (const int ranks : {2, 4, 8, 16, 64}) std::printf("  %2d ranks: %4.0f ns\n", ranks, cost(ranks));
  return 0;
}
