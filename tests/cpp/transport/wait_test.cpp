#include "transport/wait.h"

#include <atomic>

#include "support/ranks.h"

namespace ours::testing {
namespace {

TEST(a_sleeper_is_woken_by_every_signal) {
  SleepWord ping{}, pong{};
  // No time awake at all: every wait goes to sleep, so a lost wake-up would cost kLookAround and be counted.
  WaitPolicy policy;
  policy.awake = std::chrono::microseconds(0);
  const Deadline deadline = Deadline::after(std::chrono::seconds(60));
  std::atomic<int> overslept{0};
  constexpr uint32_t kRounds = 500;
  run_ranks(2, [&](int rank) {
    for (uint32_t i = 1; i <= kRounds; ++i) {
      SleepWord& mine = rank == 0 ? ping : pong;
      SleepWord& other = rank == 0 ? pong : ping;
      if (rank == 0) signal(mine);
      const auto start = Clock::now();
      wait_on(other, policy, deadline, [&] { return other.value.load() >= i; }, [] {});
      if (Clock::now() - start >= kLookAround) ++overslept;
      if (rank == 1) signal(mine);
    }
  });
  // A busy machine may delay a few waits; lost wake-ups would delay many of them.
  CHECK(overslept.load() < static_cast<int>(kRounds) / 5);
}

}  // namespace
}  // namespace ours::testing
