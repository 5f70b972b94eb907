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

void add(Shown& all, const Shown& one) { all.exchanged.balance += one.exchanged.balance; }

Shown number(uint64_t value) {
  Shown shown{};
  shown.exchanged.balance = value;
  return shown;
}

// Plain, unsynchronised memory in two places, used in turn: ThreadSanitizer proves or refutes the barrier's promise.
TEST(barrier_orders_what_is_published_in_two_places_by_turns) {
  for (const int ranks : {1, 2, 5, 18}) {  // one gate, and three and five levels of gates
    std::vector<std::array<int, 2>> published(static_cast<size_t>(ranks));
    run_sessions(ranks, 4096, [&](std::shared_ptr<NodeSession> session) {
      NodeBarrier barrier(*session, add);
      const auto me = static_cast<size_t>(session->rank());
      const Shown one = number(1);
      for (int round = 0; round < 1000 / ranks; ++round) {
        const bool shows = round % 3 == 0;
        published[me][barrier.next_parity()] = round * 100 + session->rank();
        sync(barrier, soon(), shows ? &one : nullptr);
        for (int r = 0; r < ranks; ++r) {
          CHECK_EQ(published[static_cast<size_t>(r)][barrier.parity()], round * 100 + r);
        }
        if (shows) CHECK_EQ(barrier.shown().exchanged.balance, static_cast<uint64_t>(ranks));
      }
    });
  }
}

// What they show is put together at the gates, in whatever order they come.
TEST(barrier_puts_together_what_all_ranks_show) {
  for (const int ranks : {1, 2, 5, 18}) {
    run_sessions(ranks, 4096, [&](std::shared_ptr<NodeSession> session) {
      NodeBarrier barrier(*session, add);
      const auto size = static_cast<uint64_t>(ranks);
      for (uint64_t round = 0; round < 10000 / size; ++round) {
        const Shown own = number(round + static_cast<uint64_t>(session->rank()));
        sync(barrier, soon(), &own);
        CHECK_EQ(barrier.shown().exchanged.balance, round * size + size * (size - 1) / 2);
      }
    });
  }
}

int gathered = 0;

// One thread is all ranks in turn, since arriving waits for nobody.
TEST(only_the_second_rank_at_a_gate_reads_what_the_other_shows) {
  constexpr int kRanks = 64;
  const Sessions sessions = make_sessions(kRanks, 4096);
  std::vector<std::unique_ptr<NodeBarrier>> barriers;
  for (const auto& session : sessions) {
    barriers.push_back(std::make_unique<NodeBarrier>(*session, [](Shown&, const Shown&) { ++gathered; }));
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    gathered = 0;
    const Shown own{};
    barriers[static_cast<size_t>(rank)]->arrive(&own);
    int gates = 0;
    for (int come = rank + 1; come % 2 == 0; come /= 2) ++gates;
    CHECK_EQ(gathered, gates);
    CHECK_EQ(barriers[0]->is_open(), rank == kRanks - 1);
  }
  for (const auto& barrier : barriers) CHECK(barrier->is_open());
}

/// How a rank has got stuck at a gate.
struct Stuck {
  int ranks;
  int rank;
  size_t level;
  bool writing;
};

// A rank may stop or end at a gate: as the second that came, before it has gone on, or while it writes as the first.
TEST(barrier_names_the_rank_that_has_the_others_wait_at_a_gate) {
  for (const bool leaves : {true, false}) {
    for (const Stuck& stuck : {Stuck{18, 6, 0, false}, Stuck{18, 6, 1, false}, Stuck{18, 6, 0, true},
                               Stuck{18, 6, 2, true}, Stuck{2, 1, 0, false}, Stuck{2, 0, 0, true}}) {
      std::atomic<bool> is_stuck{false};
      run_sessions(stuck.ranks, 4096, [&](std::shared_ptr<NodeSession> session) {
        NodeBarrier barrier(*session, add);
        sync(barrier, soon());  // so that all are there when time is counted
        const Shown own{};
        if (session->rank() != stuck.rank) {
          // Those on the other side of a gate must not come before the one that writes there.
          const bool opposite = session->rank() >> stuck.level == (stuck.rank >> stuck.level ^ 1);
          if (stuck.writing && opposite) wait_until([&] { return is_stuck.load(); });
          const auto deadline = leaves ? soon() : Deadline::after(std::chrono::milliseconds(200));
          const auto meet = [&] { sync(barrier, deadline, &own); };
          const std::string message = leaves ? CHECK_THROWS(PeerError, meet()) : CHECK_THROWS(TimeoutError, meet());
          const std::string only = session->describe(stuck.rank);
          CHECK_CONTAINS(message, leaves ? only + " left the group" : "for " + only + ". Are they");
          return;
        }
        const GateTree tree(static_cast<size_t>(stuck.ranks));
        auto member = static_cast<size_t>(stuck.rank);
        const auto rank = static_cast<uint16_t>(stuck.rank);
        for (size_t level = 0;; ++level, member /= 2) {
          Gate& gate = session->gate(tree.gate_of(level, member), 0);
          const auto side = static_cast<uint8_t>(1U << (member & 1));
          const bool here = level == stuck.level;
          if (here && stuck.writing) {
            gate.came = Came{2, side, true, rank}.word();
            break;
          }
          // The other has come, and this rank comes second.
          wait_until([&] {
            const Came other = Came::of(gate.came);
            return other.number == 2 && other.sides == (side ^ Came::kBoth) && !other.writing;
          });
          gate.came = Came{2, Came::kBoth, false, rank}.word();
          if (here) break;
        }
        is_stuck = true;
        if (leaves) session->leave();
      });
    }
  }
}

// A rank may end when it has arrived and before it has come to a gate.
TEST(barrier_names_a_rank_that_ended_on_its_way_to_its_gate) {
  run_sessions(2, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeBarrier barrier(*session, nullptr);
    if (session->rank() == 1) {
      session->self().arrival[1].number = 1;
      return session->leave();
    }
    CHECK_CONTAINS(CHECK_THROWS(PeerError, sync(barrier, soon())), "rank 1");
  });
}

// Rank 3 is gone while rank 1 still computes: ranks 0 and 2 must hear of it without waiting for rank 1, even if rank 3
// has come to its gate.
TEST(barrier_notices_a_rank_that_left_while_another_is_late) {
  for (const bool writing : {false, true}) {
    std::atomic<int> raised{0};
    std::atomic<bool> gone{false};
    run_sessions(4, 4096, [&](std::shared_ptr<NodeSession> session) {
      NodeBarrier barrier(*session, add);
      const Shown own{};
      if (session->rank() == 3) {
        if (writing) session->gate(GateTree(4).gate_of(0, 3), 1).came = Came{1, 2, true, 3}.word();
        gone = true;
        return session->leave();
      }
      if (session->rank() == 2) wait_until([&] { return gone.load(); });  // it comes to rank 3's gate
      if (session->rank() == 1) wait_until([&] { return raised == 2; });
      CHECK_CONTAINS(CHECK_THROWS(PeerError, sync(barrier, soon(), &own)), "rank 3");
      ++raised;
    });
  }
}

}  // namespace
}  // namespace ours::testing
