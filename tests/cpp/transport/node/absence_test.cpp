#include <atomic>

#include "common/error.h"
#include "support/node_ranks.h"
#include "transport/node/node_barrier.h"

namespace ours {
namespace {

// Rank 3 is gone while rank 1 still computes: ranks 0 and 2 must hear of it without waiting for rank 1.
TEST(barrier_notices_a_rank_that_left_while_another_is_late) {
  std::atomic<int> raised{0};
  std::atomic<bool> in_time{true};
  testing::run_sessions(4, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeBarrier barrier(*session);
    const auto sync = [&] {
      barrier.sync(Deadline::after(std::chrono::seconds(60)), 1, [] { return std::string("a test"); });
    };
    if (session->rank() == 3) return session->leave();
    if (session->rank() == 1) {
      const auto patience = Deadline::after(std::chrono::seconds(10));
      while (raised.load() < 2 && !patience.passed()) std::this_thread::yield();
      if (raised.load() < 2) in_time = false;
    }
    CHECK_CONTAINS(CHECK_THROWS(PeerError, sync()), "rank 3");
    ++raised;
  });
  CHECK(in_time.load());
}

}  // namespace
}  // namespace ours
