#include "transport/node/signal_counters.h"

#include <chrono>
#include <memory>

#include "common/error.h"
#include "support/node_ranks.h"

namespace ours::testing {
namespace {

constexpr std::chrono::seconds kPatience{60};
constexpr std::chrono::milliseconds kShort{100};

/// Ranks as threads, with counters in ordinary memory.
struct Counters {
  explicit Counters(int ranks) : sessions(make_sessions(ranks, 4096)) {
    const auto count = static_cast<size_t>(ranks);
    memory.assign(count, std::vector<uint32_t>(count, 0));
    std::vector<std::byte*> starts;
    for (auto& words : memory) starts.push_back(reinterpret_cast<std::byte*>(words.data()));
    for (auto& session : sessions) of.push_back(std::make_unique<SignalCounters>(session, starts));
  }

  Sessions sessions;
  std::vector<std::vector<uint32_t>> memory;
  std::vector<std::unique_ptr<SignalCounters>> of;
};

TEST(signal_counters_count_what_was_not_taken) {
  Counters counters(3);
  CHECK(!counters.of[1]->take(0));
  for (int i = 0; i < 3; ++i) counters.of[0]->send(1);
  counters.of[2]->send(1);
  for (int i = 0; i < 3; ++i) counters.of[1]->wait(0, kPatience);
  CHECK_CONTAINS(CHECK_THROWS(TimeoutError, counters.of[1]->wait(0, kShort)), "wait_signal of a window: Timed out");
  CHECK(counters.of[1]->take(2));
  CHECK(!counters.of[1]->take(2));
  counters.of[0]->send(0);  // to oneself
  counters.of[0]->wait(0, kPatience);
}

TEST(signal_counters_hand_over_what_was_written_before_the_signal) {
  Counters counters(2);
  int message = 0;
  run_ranks(2, [&](int rank) {
    for (int step = 1; step <= 200; ++step) {
      if (rank == 0) {
        message = step;
        counters.of[0]->send(1);
        counters.of[0]->wait(1, kPatience);
      } else {
        counters.of[1]->wait(0, kPatience);
        CHECK_EQ(message, step);
        counters.of[1]->send(0);
      }
    }
  });
}

TEST(signal_counters_hear_of_a_peer_that_leaves_after_its_last_signal) {
  Counters counters(2);
  counters.of[1]->send(0);
  counters.sessions[1]->leave();
  counters.of[0]->wait(1, kPatience);
  CHECK_CONTAINS(CHECK_THROWS(PeerError, counters.of[0]->wait(1, kPatience)), "rank 1");
}

}  // namespace
}  // namespace ours::testing
