#include "transport/node/node_failure.h"

#include <string>
#include <vector>

#include "common/error.h"
#include "support/node_ranks.h"
#include "transport/wait.h"

namespace ours::testing {
namespace {

TEST(the_first_failure_is_everyones_failure) {
  std::vector<std::string> messages(4);
  run_sessions(4, 4096, [&](std::shared_ptr<NodeSession> session) {
    const int rank = session->rank();
    if (rank >= 2) session->failure().fail(FailureKind::Peer, "rank " + std::to_string(rank) + " was first");
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    wait_on(
        session->self().doorbell, session->wait_policy(), deadline, [&] { return session->failure().failed(); }, [] {});
    messages[static_cast<size_t>(rank)] = CHECK_THROWS(PeerError, session->failure().check());
    // Later failures do not replace it, not even on this rank.
    session->failure().fail(FailureKind::Timeout, "too late");
    CHECK_EQ(session->failure().message(), messages[static_cast<size_t>(rank)]);
  });
  CHECK_EQ(messages[0], messages[1]);
  CHECK(messages[0] == "rank 2 was first" || messages[0] == "rank 3 was first");
}

TEST(a_failure_longer_than_the_segment_holds_is_cut_for_peers) {
  run_sessions(2, 4096, [](std::shared_ptr<NodeSession> session) {
    if (session->rank() == 0) session->failure().fail(FailureKind::Timeout, std::string(100000, 'x'));
    const Deadline deadline = Deadline::after(std::chrono::seconds(60));
    wait_on(
        session->self().doorbell, session->wait_policy(), deadline, [&] { return session->failure().failed(); }, [] {});
    const auto message = CHECK_THROWS(TimeoutError, session->failure().check());
    CHECK_EQ(message.size(), session->rank() == 0 ? 100000u : sizeof(SegmentHeader::failure_message) - 1);
  });
}

}  // namespace
}  // namespace ours::testing
