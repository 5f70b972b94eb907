#include "transport/node/core_spread.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <vector>

#include "support/node_ranks.h"
#include "transport/node/node_barrier.h"

namespace ours::testing {
namespace {

TEST(the_last_rank_of_a_crowded_core_moves_to_the_emptiest) {
  const auto better = [](const std::vector<int>& cores, int rank, const std::vector<int>& allowed) {
    return better_core(cores, rank, allowed, [](int) { return 0; });
  };
  const std::vector<int> two{0, 1};
  CHECK_EQ(better({0, 0, 0, 1}, 2, two), 1);
  CHECK_EQ(better({0, 0, 0, 1}, 1, two), -1);  // not the last one on its core
  CHECK_EQ(better({0, 0, 0, 1}, 3, two), -1);
  CHECK_EQ(better({0, 0, 1}, 1, two), -1);  // it would only change places
  CHECK_EQ(better({3, 3}, 1, {3, 5}), 5);
  CHECK_EQ(better({3, 3}, 1, {3}), -1);
  CHECK_EQ(better({3, 3}, 1, {}), -1);
  CHECK_EQ(better({0, 0, 0, 0, 1, 1, 2}, 3, {0, 1, 2}), 2);
}

TEST(ranks_move_to_another_socket_only_if_their_own_has_no_better_core) {
  const std::vector<int> four{0, 1, 2, 3};
  const auto better = [&](const std::vector<int>& cores, int rank) {
    return better_core(cores, rank, four, [](int core) { return core % 2; });  // sockets {0, 2} and {1, 3}
  };
  CHECK_EQ(better({0, 0}, 1), 2);
  CHECK_EQ(better({1, 1}, 1), 3);
  CHECK_EQ(better({0, 0, 0, 2, 1}, 2), 2);     // although there is nobody on core 3
  CHECK_EQ(better({0, 0, 0, 2, 2, 1}, 2), 3);  // core 2 has only one fewer
}

TEST(a_cpu_has_a_socket) {
  CHECK_EQ(socket_of(-1), -1);
  CHECK_EQ(socket_of(static_cast<int>(kMostCores)), -1);
  std::ifstream file("/sys/devices/system/cpu/cpu0/topology/physical_package_id");
  int told = -1;
  file >> told;
  CHECK_EQ(socket_of(0), file ? told : -1);
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
    NodeBarrier barrier(*session, nullptr);
    const auto meet = [&] { sync(barrier, Deadline::after(std::chrono::seconds(30))); };
    CoreSpread spread(*session);
    const size_t parity = barrier.next_parity();
    std::atomic<int32_t>& core = session->self().arrival[parity].core;
    spread.publish(parity);
    CHECK(std::find(cores.begin(), cores.end(), core.load()) != cores.end());
    core.store(cores[0]);
    meet();
    const auto begin = Clock::now();
    CHECK_EQ(spread.settle(parity), session->rank() == 1);
    const bool again = spread.settle(parity);
    // It must not be tried again so soon, unless the test itself was slow.
    CHECK(!again || Clock::now() - begin >= std::chrono::milliseconds(4));
    meet();
    core.store(cores[static_cast<size_t>(session->rank())]);
    meet();
    CHECK_EQ(CoreSpread(*session).settle(parity), false);
  });
}

}  // namespace
}  // namespace ours::testing
