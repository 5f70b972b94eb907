#include "transport/node/core_spread.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "support/node_ranks.h"
#include "transport/node/node_barrier.h"

namespace ours::testing {
namespace {

TEST(the_last_rank_of_a_crowded_core_moves_to_the_emptiest) {
  const std::vector<int> two{0, 1};
  CHECK_EQ(better_core({0, 0, 0, 1}, 2, two), 1);
  CHECK_EQ(better_core({0, 0, 0, 1}, 1, two), -1);  // not the last one on its core
  CHECK_EQ(better_core({0, 0, 0, 1}, 3, two), -1);
  CHECK_EQ(better_core({0, 0, 1}, 1, two), -1);  // it would only change places
  CHECK_EQ(better_core({3, 3}, 1, {3, 5}), 5);
  CHECK_EQ(better_core({3, 3}, 1, {3}), -1);
  CHECK_EQ(better_core({3, 3}, 1, {}), -1);
  CHECK_EQ(better_core({0, 0, 0, 0, 1, 1, 2}, 3, {0, 1, 2}), 2);
}

TEST(a_moved_thread_may_be_moved_on_as_before) {
  const std::vector<int> before = allowed_cores();
  CHECK(!before.empty());
  for (const int core : before) {
    CHECK(move_to_core(core));
    CHECK(allowed_cores() == before);
  }
  CHECK(!move_to_core(CPU_SETSIZE - 1) || before.back() == CPU_SETSIZE - 1);
  CHECK(allowed_cores() == before);
}

TEST(of_ranks_on_one_core_the_last_moves) {
  const std::vector<int> cores = allowed_cores();
  if (cores.size() < 2) return;  // nowhere to move to
  run_sessions(2, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeBarrier barrier(*session);
    const auto sync = [&] { barrier.sync(Deadline::after(std::chrono::seconds(30)), 1, [] { return "a test"; }); };
    CoreSpread spread(*session);
    const size_t parity = barrier.next_parity();
    std::atomic<int32_t>& core = session->self().arrival[parity].core;
    spread.publish(parity);
    CHECK(std::find(cores.begin(), cores.end(), core.load()) != cores.end());
    core.store(cores[0]);
    sync();
    const auto begin = Clock::now();
    CHECK_EQ(spread.settle(parity), session->rank() == 1);
    const bool again = spread.settle(parity);
    // It must not be tried again so soon, unless the test itself was slow.
    CHECK(!again || Clock::now() - begin >= std::chrono::milliseconds(4));
    sync();
    core.store(cores[static_cast<size_t>(session->rank())]);
    sync();
    CHECK_EQ(CoreSpread(*session).settle(parity), false);
  });
}

}  // namespace
}  // namespace ours::testing
