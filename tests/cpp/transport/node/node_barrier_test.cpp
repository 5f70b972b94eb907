#include "transport/node/node_barrier.h"

#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "support/node_ranks.h"

namespace ours::testing {
namespace {

Deadline soon() { return Deadline::after(std::chrono::seconds(60)); }

std::string a_test() { return "a test"; }

// Plain, unsynchronised memory in two places, used in turn: ThreadSanitizer proves or refutes the barrier's promise.
TEST(barrier_orders_what_is_published_in_two_places_by_turns) {
  for (const int ranks : {1, 4, 5, 18}) {  // one gate, and two and three levels of gates
    std::vector<std::array<int, 2>> published(static_cast<size_t>(ranks));
    run_sessions(ranks, 4096, [&](std::shared_ptr<NodeSession> session) {
      NodeBarrier barrier(*session);
      const auto me = static_cast<size_t>(session->rank());
      for (int round = 0; round < 1000 / ranks; ++round) {
        published[me][barrier.next_parity()] = round * 100 + session->rank();
        barrier.sync(soon(), 1, a_test);
        for (int r = 0; r < ranks; ++r) {
          CHECK_EQ(published[static_cast<size_t>(r)][barrier.parity()], round * 100 + r);
        }
      }
    });
  }
}

// What they show is put together by whoever is the last at a gate.
TEST(barrier_puts_together_what_all_ranks_show) {
  const auto add = [](Shown& all, const Shown& one) { all.exchanged.balance += one.exchanged.balance; };
  for (const int ranks : {1, 4, 5, 18}) {
    run_sessions(ranks, 4096, [&](std::shared_ptr<NodeSession> session) {
      NodeBarrier barrier(*session);
      const auto size = static_cast<uint64_t>(ranks);
      for (uint64_t round = 0; round < 1000 / size; ++round) {
        Shown& own = session->self().arrival[barrier.next_parity()].shown;
        own.exchanged.balance = round + static_cast<uint64_t>(session->rank());
        barrier.sync(soon(), 1, a_test, add);
        CHECK_EQ(barrier.shown().exchanged.balance, round * size + size * (size - 1) / 2);
      }
    });
  }
}

int gathered = 0;

// One thread is all ranks in turn, since arriving waits for nobody.
TEST(only_the_last_rank_at_a_gate_reads_what_others_show) {
  constexpr int kRanks = 64;
  const Sessions sessions = make_sessions(kRanks, 4096);
  std::vector<std::unique_ptr<NodeBarrier>> barriers;
  for (const auto& session : sessions) barriers.push_back(std::make_unique<NodeBarrier>(*session));
  for (int rank = 0; rank < kRanks; ++rank) {
    gathered = 0;
    barriers[static_cast<size_t>(rank)]->arrive([](Shown&, const Shown&) { ++gathered; });
    int gates = 0;
    for (int come = rank + 1; come % 4 == 0 && gates < 3; come /= 4) ++gates;
    CHECK_EQ(gathered, 3 * gates);
    CHECK_EQ(barriers[0]->is_open(), rank == kRanks - 1);
  }
  for (const auto& barrier : barriers) CHECK(barrier->is_open());
}

// A rank may stop or end after it came to a gate as the last, and before it has gone on.
TEST(barrier_names_the_rank_that_has_the_others_wait_at_a_gate) {
  for (const bool leaves : {true, false}) {
    run_sessions(18, 4096, [&](std::shared_ptr<NodeSession> session) {
      NodeBarrier barrier(*session);
      const int rank = session->rank();
      if (rank == 6) {
        session->self().arrival[1].number = 1;
        Gate& gate = session->gate(GateTree(18).group(0, 6).gate, 1);
        wait_until([&] { return static_cast<uint16_t>(gate.came >> 16) == 3; });  // how many have come
        gate.came = uint64_t{1} << 32 | 4 << 16 | 6;
        if (leaves) session->leave();
        return;
      }
      const auto deadline = leaves ? soon() : Deadline::after(std::chrono::milliseconds(200));
      const auto sync = [&] { barrier.sync(deadline, 1, a_test); };
      const std::string message = leaves ? CHECK_THROWS(PeerError, sync()) : CHECK_THROWS(TimeoutError, sync());
      const std::string only = session->describe(6);
      CHECK_CONTAINS(message, leaves ? only + " left the group" : "for " + only + ". Are they");
    });
  }
}

// Rank 3 is gone while rank 1 still computes: ranks 0 and 2 must hear of it without waiting for rank 1.
TEST(barrier_notices_a_rank_that_left_while_another_is_late) {
  std::atomic<int> raised{0};
  run_sessions(4, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeBarrier barrier(*session);
    const auto sync = [&] { barrier.sync(soon(), 1, a_test); };
    if (session->rank() == 3) return session->leave();
    if (session->rank() == 1) wait_until([&] { return raised == 2; });
    CHECK_CONTAINS(CHECK_THROWS(PeerError, sync()), "rank 3");
    ++raised;
  });
}

}  // namespace
}  // namespace ours::testing
