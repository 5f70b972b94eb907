#include "collectives/node/node_rounds.h"

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "support/node_ranks.h"
#include "transport/arrivals.h"
#include "transport/stop_notice.h"

// What the ranks of a large node show one another with a call, through several levels of gates.

namespace ours::testing {
namespace {

constexpr int kRanks = 18;

TEST(a_call_that_differs_on_one_of_many_ranks_fails_on_all) {
  for (const int other : {0, 5, 17}) {
    run_sessions(kRanks, 4096, [&](std::shared_ptr<NodeSession> session) {
      NodeGroup group(session);
      std::vector<float> data(session->rank() == other ? 3 : 2, 1.0f);
      const std::string message = CHECK_THROWS(MismatchError, sum(group, 0, data));
      CHECK_CONTAINS(message, "rank " + std::to_string(other) + " (");
      CHECK_CONTAINS(message, "3 x float32");
    });
  }
}

TEST(all_of_many_ranks_know_which_came_last) {
  std::atomic<int> came{0};
  run_sessions(kRanks, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeGroup group(session);
    const int rank = group.rank();
    if (rank == 11) wait_until([&] { return came == kRanks - 2; });
    if (rank == 3) wait_until([&] { return came == kRanks - 1; });
    const int64_t now = steady_us(Clock::now());
    wait_until([&] { return steady_us(Clock::now()) > now; });  // so that no two of them call at the same time
    Arrivals arrivals(kRanks);
    arrivals.begin(rank);
    Call call = call_of(Op::Barrier, DType::UInt8, 0);
    call.called = Clock::now();
    call.arrivals = &arrivals;
    ++came;
    group.barrier(call);
    CHECK_EQ(arrivals.last(), 3);
    CHECK_EQ(arrivals.last(3), 11);
  });
}

TEST(all_of_many_ranks_hear_of_a_stop) {
  for (const int asked : {0, 5, 17}) {
    run_sessions(kRanks, 4096, [&](std::shared_ptr<NodeSession> session) {
      NodeGroup group(session);
      for (uint64_t seq = 0; seq < 4; ++seq) {
        StopNotice stop(seq == 2 && group.rank() == asked);
        Call call = call_of(Op::Barrier, DType::UInt8, seq);
        call.stop = &stop;
        group.barrier(call);
        CHECK_EQ(stop.told(), seq == 2);
      }
    });
  }
}

}  // namespace
}  // namespace ours::testing
