#include "transport/node/signal_pads.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "common/error.h"
#include "support/node_ranks.h"
#include "support/patience.h"

namespace ours::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kPatience{60};
constexpr milliseconds kShort{100};

/// Ranks as threads, with pads in ordinary memory.
struct Pads {
  explicit Pads(int ranks, size_t words = 16) : sessions(make_sessions(ranks, 4096)) {
    for (int r = 0; r < ranks; ++r) memory.emplace_back(words, 0);
    std::vector<std::byte*> starts;
    for (auto& pad : memory) starts.push_back(reinterpret_cast<std::byte*>(pad.data()));
    for (auto& session : sessions) of.emplace_back(session, starts, words * sizeof(uint32_t));
  }

  bool all_zero() const {
    for (const auto& pad : memory) {
      for (const uint32_t word : pad) {
        if (word != 0) return false;
      }
    }
    return true;
  }

  Sessions sessions;
  std::vector<std::vector<uint32_t>> memory;
  std::vector<SignalPads> of;
};

TEST(signal_pads_barrier_separates_what_comes_before_from_what_comes_after) {
  for (const int ranks : {1, 2, 3, 4}) {
    Pads pads(ranks);
    std::vector<int> written(static_cast<size_t>(ranks), -1);
    run_ranks(ranks, [&](int rank) {
      const auto own = static_cast<size_t>(rank);
      for (int step = 0; step < 50; ++step) {
        written[own] = step;
        pads.of[own].barrier(1, kPatience);
        for (const int value : written) CHECK_EQ(value, step);
        pads.of[own].barrier(0, kPatience);
      }
    });
    CHECK(pads.all_zero());
  }
}

TEST(signal_pads_hand_over_what_was_written_before_the_signal) {
  Pads pads(2);
  int message = 0;
  run_ranks(2, [&](int rank) {
    for (int step = 1; step <= 200; ++step) {
      if (rank == 0) {
        message = step;
        pads.of[0].put(1, 2, kPatience);
        pads.of[0].wait(1, 2, kPatience);
      } else {
        pads.of[1].wait(0, 2, kPatience);
        CHECK_EQ(message, step);
        pads.of[1].put(0, 2, kPatience);
      }
    }
  });
  CHECK(pads.all_zero());
}

TEST(signal_pads_keep_channels_apart) {
  Pads pads(2);
  pads.of[0].put(1, 3, kPatience);
  CHECK_EQ(pads.memory[1][3 * 2 + 0], uint32_t{1});
  CHECK_THROWS(TimeoutError, pads.of[1].wait(0, 2, kShort));
  pads.of[1].wait(0, 3, kPatience);
  pads.of[0].put(0, 3, kPatience);  // to oneself
  pads.of[0].wait(0, 3, kPatience);
  CHECK(pads.all_zero());
}

TEST(signal_pads_may_be_tried_again_after_a_timeout) {
  Pads pads(2);
  const std::string late = CHECK_THROWS(TimeoutError, pads.of[1].wait(0, 0, kShort));
  CHECK_CONTAINS(late, "wait_signal (channel 0) on symmetric memory: Timed out waiting 100ms on rank 1");
  CHECK_CONTAINS(late, "for rank 0");
  pads.of[0].put(1, 0, kPatience);
  CHECK_THROWS(TimeoutError, pads.of[0].put(1, 0, kShort));  // nobody has taken the first one
  pads.of[1].wait(0, 0, kPatience);
  CHECK_THROWS(TimeoutError, pads.of[1].wait(0, 0, kShort));
  CHECK(!pads.sessions[0]->failure().failed());
}

TEST(signal_pads_barrier_that_times_out_ends_the_session_for_all) {
  Pads pads(3);
  const std::string late = CHECK_THROWS(TimeoutError, pads.of[0].barrier(0, kShort));
  CHECK_CONTAINS(late, "for rank 1");
  CHECK_EQ(CHECK_THROWS(TimeoutError, pads.of[2].wait(1, 0, kPatience)), late);
  CHECK_EQ(CHECK_THROWS(TimeoutError, pads.of[1].barrier(0, kPatience)), late);
}

TEST(signal_pads_hear_of_a_peer_that_leaves) {
  Pads pads(3);
  std::thread leaver([&] { pads.sessions[1]->leave(); });
  // Rank 0 waits for it, rank 2 for rank 0.
  const auto errors = run_ranks_catching(3, [&](int rank) {
    if (rank == 0) pads.of[0].wait(1, 0, kPatience);
    if (rank == 2) pads.of[2].wait(0, 0, kPatience);
  });
  leaver.join();
  CHECK_CONTAINS(message_of(errors[0]), "rank 1");
  CHECK_CONTAINS(message_of(errors[0]), "left the group");
  CHECK_EQ(message_of(errors[2]), message_of(errors[0]));
}

TEST(signal_pads_take_the_last_signal_of_a_peer_that_has_left) {
  Pads pads(2);
  pads.of[1].put(0, 0, kPatience);
  pads.sessions[1]->leave();
  pads.of[0].wait(1, 0, kPatience);
  CHECK_THROWS(PeerError, pads.of[0].wait(1, 0, kPatience));
}

TEST(signal_pads_refuse_what_does_not_exist) {
  Pads pads(3);  // 16 words: 5 channels
  pads.of[0].put(1, 4, kPatience);
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, pads.of[0].put(1, 5, kPatience)), "channels 0 to 4 for 3 ranks");
  CHECK_THROWS(InvalidArgument, pads.of[0].barrier(-1, kPatience));
  CHECK_THROWS(InvalidArgument, pads.of[0].put(3, 0, kPatience));
  CHECK_THROWS(InvalidArgument, pads.of[0].wait(-1, 0, kPatience));
}

}  // namespace
}  // namespace ours::testing
