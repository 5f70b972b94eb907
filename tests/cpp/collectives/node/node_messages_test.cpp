#include "collectives/node/node_messages.h"

#include "support/node_ranks.h"

namespace ours::testing {
namespace {

std::shared_ptr<Message> message_of(Op op, std::vector<int>& data, int peer) {
  return std::make_shared<Message>(op, data.data(), data.size() * sizeof(int), DType::Int32, peer, 0,
                                   std::make_shared<TransferLimit>(std::chrono::minutes(1)), nullptr);
}

// After a failure all messages are taken out while another thread may still be moving them.
TEST(a_carrier_that_lost_its_messages_writes_nowhere) {
  auto leader = NodeSession::create(0, 2, NodeConfig{4096, 4096});
  auto other = std::make_shared<NodeSession>(1, 2, leader->memory());
  NodeMessages sender(leader), receiver(other);
  std::vector<int> data(10000, 5), target(data.size());
  Messages ended;
  sender.add(message_of(Op::Send, data, 1));
  receiver.add(message_of(Op::Recv, target, 0));
  sender.progress(ended);
  receiver.progress(ended);  // a part has arrived
  sender.progress(ended);
  CHECK_EQ(receiver.take_all().size(), 1u);
  const auto before = target;
  CHECK(!receiver.progress(ended));
  CHECK(ended.empty());
  CHECK(target == before);
  CHECK(receiver.empty());
}

}  // namespace
}  // namespace ours::testing
