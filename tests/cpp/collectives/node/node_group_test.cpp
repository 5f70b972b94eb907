#include "collectives/node/node_group.h"

#include "support/node_ranks.h"

// Tests of groups in shared memory beyond the contract (group_contract_test.cpp).

namespace ours {
namespace {

using testing::call_of;
using testing::run_sessions;

TEST(a_mismatch_in_shared_memory_names_all_ranks) {
  run_sessions(3, 4096, [](std::shared_ptr<NodeSession> session) {
    NodeGroup group(session);
    float data[9] = {};
    const size_t count = session->rank() == 1 ? 8 : 9;
    const std::string message = CHECK_THROWS(
        MismatchError, group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data, data, count, Reduction{}));
    for (const char* word : {"rank 0", "rank 1", "rank 2"}) CHECK_CONTAINS(message, word);
  });
}

TEST(a_session_opens_by_its_address_and_refuses_a_wrong_nonce) {
  auto leader = NodeSession::create(0, 2, NodeConfig{4096, 1024, 4096});
  std::string wrong = leader->address();
  const auto bracket = wrong.find(" [");
  wrong[bracket - 1] = wrong[bracket - 1] == '0' ? '1' : '0';
  CHECK_THROWS(NotSameNode, NodeSession::open(1, 2, wrong));
  CHECK_THROWS(Error, NodeSession::open(1, 3, leader->address()));
  CHECK_THROWS(Error, NodeSession::open(1, 2, "nonsense"));
  auto other = NodeSession::open(1, 2, leader->address());
  CHECK(other->memory()->data() != leader->memory()->data());
  CHECK_THROWS(Error, NodeSession::open(1, 2, leader->address()));  // taken
  other->self().monitor.value.store(77);
  CHECK_EQ(leader->block(1).monitor.value.load(), 77u);
}

TEST(attaching_waits_and_names_the_absent) {
  auto leader = NodeSession::create(1, 3, NodeConfig{4096, 1024, 4096});
  const std::string message =
      CHECK_THROWS(TimeoutError, leader->wait_attached(Deadline::after(std::chrono::milliseconds(100)), [] {}));
  CHECK(message.find("absent: rank 0, 2") != std::string::npos);
}

}  // namespace
}  // namespace ours
