#include "transport/node/node_barrier.h"

#include <array>
#include <atomic>
#include <vector>

#include "support/node_ranks.h"

namespace ours::testing {
namespace {

// Plain, unsynchronised memory in two places, used in turn: ThreadSanitizer proves or refutes the barrier's promise.
TEST(barrier_orders_what_is_published_in_two_places_by_turns) {
  constexpr int kRanks = 4, kRounds = 400;
  std::vector<std::array<int, 2>> published(kRanks);
  run_sessions(kRanks, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeBarrier barrier(*session);
    const auto me = static_cast<size_t>(session->rank());
    for (int round = 0; round < kRounds; ++round) {
      published[me][barrier.next_parity()] = round * 10 + session->rank();
      barrier.sync(Deadline::after(std::chrono::seconds(60)), 1, [] { return std::string("a test"); });
      for (int r = 0; r < kRanks; ++r) {
        CHECK_EQ(published[static_cast<size_t>(r)][barrier.parity()], round * 10 + r);
      }
    }
  });
}

// Rank 3 is gone while rank 1 still computes: ranks 0 and 2 must hear of it without waiting for rank 1.
TEST(barrier_notices_a_rank_that_left_while_another_is_late) {
  std::atomic<int> raised{0};
  run_sessions(4, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeBarrier barrier(*session);
    const auto sync = [&] {
      barrier.sync(Deadline::after(std::chrono::seconds(60)), 1, [] { return std::string("a test"); });
    };
    if (session->rank() == 3) return session->leave();
    if (session->rank() == 1) wait_until([&] { return raised == 2; });
    CHECK_CONTAINS(CHECK_THROWS(PeerError, sync()), "rank 3");
    ++raised;
  });
}

}  // namespace
}  // namespace ours::testing
