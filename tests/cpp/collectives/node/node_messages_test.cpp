#include "collectives/node/node_messages.h"

#include <malloc.h>
#include <sched.h>

#include <numeric>
#include <utility>

#include "support/node_ranks.h"
#include "transport/node/core_spread.h"

namespace ours::testing {
namespace {

std::shared_ptr<Message> message_of(Op op, std::vector<int>& data, int peer) {
  return std::make_shared<Message>(op, data.data(), data.size() * sizeof(int), DType::Int32, peer, 0,
                                   std::make_shared<TransferLimit>(std::chrono::minutes(1)), nullptr);
}

#ifdef __GLIBC_PREREQ
#if __GLIBC_PREREQ(2, 33)
// A process may have hundreds of groups, and most of them never send a message.
TEST(a_carrier_without_messages_takes_little_memory_for_each_peer) {
  constexpr int kRanks = 64;
  const auto session = NodeSession::create(0, kRanks, NodeConfig{4096, 4096});
  const size_t before = ::mallinfo2().uordblks;
  const NodeMessages carrier(session);
  CHECK(::mallinfo2().uordblks < before + size_t{kRanks} * 400);  // with two deques for each it is 1,300
}
#endif
#endif

// After a failure all messages are taken out while another thread may still be moving them.
TEST(a_carrier_that_lost_its_messages_writes_nowhere) {
  auto leader = NodeSession::create(0, 2, NodeConfig{4096, 4096});
  auto other = std::make_shared<NodeSession>(1, 2, leader->memory());
  NodeMessages sender(leader), receiver(other);
  std::vector<int> data(10000, 5), target(data.size());
  Messages ended;
  sender.add(message_of(Op::Send, data, 1));
  receiver.add(message_of(Op::Recv, target, 0));
  sender.progress(ended, Mover::Other);
  receiver.progress(ended, Mover::Other);  // a part has arrived
  sender.progress(ended, Mover::Other);
  CHECK_EQ(receiver.take_all().size(), 1u);
  const auto before = target;
  CHECK(!receiver.progress(ended, Mover::Other));
  CHECK(ended.empty());
  CHECK(target == before);
  CHECK(receiver.empty());
}

// It reads them in the sender's memory, and must not take for the message what comes there later.
TEST(a_receiver_hears_that_a_message_it_reads_was_taken_back) {
  const Sessions sessions = make_sessions(2, 4096);
  if (!sessions[1]->reads_all(1)) return;  // this system forbids it
  NodeMessages sender(sessions[0]), receiver(sessions[1]);
  std::vector<int> data(size_t{1} << 20, 5), target(data.size());
  Messages ended;
  sender.add(message_of(Op::Send, data, 1));
  receiver.add(message_of(Op::Recv, target, 0));
  sender.progress(ended, Mover::Other);
  receiver.progress(ended, Mover::Other);  // a part has arrived
  CHECK(ended.empty());
  CHECK_EQ(sender.take_all().size(), 1u);
  const std::string message = CHECK_THROWS(PeerError, wait_until([&] {
                                             receiver.progress(ended, Mover::Other);
                                             return !ended.empty();
                                           }));
  CHECK_CONTAINS(message, "rank 0");
  CHECK(ended.empty());
}

TEST(a_message_is_sent_when_the_receiver_has_read_it) {
  for (const auto& [direct, mover] : {std::pair(true, Mover::Other), {true, Mover::Waits}, {false, Mover::Waits}}) {
    const Sessions sessions = make_sessions(2, 4096, {direct});
    NodeMessages sender(sessions[0]), receiver(sessions[1]);
    std::vector<int> data(5000, 5), target(data.size());
    Messages sent, received;
    sender.add(message_of(Op::Send, data, 1));
    for (int i = 0; i < 3; ++i) sender.progress(sent, mover);
    CHECK(sent.empty());  // it is longer than the channel
    receiver.add(message_of(Op::Recv, target, 0));
    wait_until([&] {
      sender.progress(sent, mover);
      receiver.progress(received, Mover::Other);
      return !sent.empty() && !received.empty();
    });
    CHECK(target == data);
  }
}

TEST(long_messages_arrive_whichever_way_they_are_written) {
  for (const Setting write_around : {Setting::On, Setting::Off, Setting::Auto}) {
    const Sessions sessions = make_sessions(2, 0, {false});
    NodeMessages sender(sessions[0], write_around), receiver(sessions[1]);
    for (const size_t count : {10000, 65536, 300001}) {
      std::vector<int> data(count), target(count);
      std::iota(data.begin(), data.end(), static_cast<int>(count));
      Messages sent, received;
      sender.add(message_of(Op::Send, data, 1));
      receiver.add(message_of(Op::Recv, target, 0));
      wait_until([&] {
        sender.progress(sent, Mover::Waits);
        receiver.progress(received, Mover::Waits);
        return !sent.empty() && !received.empty();
      });
      CHECK(target == data);
    }
  }
}

// Where both have cores, a sender that waits takes the faster way, once it has tried both: copying by both, or reading
// by one. One that computes is not disturbed.
TEST(a_long_message_is_copied_or_lent_by_a_sender_that_waits_and_lent_by_one_that_does_not) {
  for (const Mover mover : {Mover::Waits, Mover::Other}) {
    const Sessions sessions = make_sessions(2, 4096);
    if (!sessions[1]->reads_all(1)) return;  // this system forbids it
    const bool waits_to_choose = sessions[0]->have_own_cores();
    NodeMessages sender(sessions[0]), receiver(sessions[1]);
    std::vector<int> data(sessions[0]->layout().ring_bytes, 5);
    const Channel channel(*sessions[0], 0, 1);
    int copied = 0;
    for (int i = 0; i < 4; ++i) {
      std::vector<int> target(data.size());
      Messages sent, received;
      sender.add(message_of(Op::Send, data, 1));
      const uint32_t heard = sender.heard();
      sender.progress(sent, Mover::Goes);
      CHECK_EQ(channel.readable() == 0, waits_to_choose);  // it may come to wait
      CHECK_EQ(sender.heard() != heard, waits_to_choose);  // and other threads hear of it
      sender.progress(sent, mover);
      copied += channel.readable() == channel.capacity() ? 1 : 0;
      receiver.add(message_of(Op::Recv, target, 0));
      wait_until([&] {
        sender.progress(sent, mover);
        CHECK(sent.empty() || channel.readable() == 0);  // a sent one has arrived
        receiver.progress(received, Mover::Waits);
        return !sent.empty() && !received.empty();
      });
      CHECK(target == data);
    }
    CHECK_EQ(copied, waits_to_choose && mover == Mover::Waits ? 2 : 0);
  }
}

// Otherwise both ranks would copy twice as much as by reading.
TEST(a_sender_that_also_receives_lends_its_memory) {
  const Sessions sessions = make_sessions(2, 4096);
  if (!sessions[1]->reads_all(1)) return;  // this system forbids it
  NodeMessages sender(sessions[0]);
  std::vector<int> data(sessions[0]->layout().ring_bytes, 5), target(1);
  Messages ended;
  sender.add(message_of(Op::Recv, target, 1));
  sender.add(message_of(Op::Send, data, 1));
  sender.progress(ended, Mover::Waits);
  const Channel channel(*sessions[0], 0, 1);
  CHECK(channel.readable() > 0 && channel.readable() < channel.capacity());
}

// The scheduler may leave both on one core, where each waits for the other to give it away.
TEST(a_rank_that_waits_for_a_message_leaves_a_core_that_it_shares) {
  const std::vector<int> cores = allowed_cores();
  const Sessions sessions = make_sessions(2, 4096);
  if (cores.size() < 2) return;  // nowhere to move to
  CHECK_EQ(sessions[0]->self().core_of_messages.load(), -1);
  sessions[0]->self().core_of_messages.store(cores[0]);
  int left = 0;
  for (int i = 0; i < 9; ++i) {
    NodeMessages waiting(sessions[1]);
    CHECK(move_to_core(cores[0]));
    waiting.rest([] { return true; });
    left += sched_getcpu() != cores[0] ? 1 : 0;
    CHECK_EQ(sessions[1]->self().core_of_messages.load(), -1);
  }
  CHECK(left > 4);  // the scheduler may have moved it before or after
}

// It may leave before the sender has looked.
TEST(a_message_that_a_rank_received_before_it_left_has_arrived) {
  for (const int before : {0, 2}) {  // the next message is lent, or copied, if ranks have cores of their own
    const Sessions sessions = make_sessions(2, 4096);
    NodeMessages sender(sessions[0]), receiver(sessions[1]);
    std::vector<int> data(sessions[0]->layout().ring_bytes, 5), target(data.size()), other(data.size());
    Messages sent, received;
    const auto move = [&](const auto& ended) {
      wait_until([&] {
        sender.progress(sent, Mover::Waits);
        receiver.progress(received, Mover::Other);
        return ended();
      });
    };
    for (int i = 0; i < before; ++i) {
      sender.add(message_of(Op::Send, data, 1));
      receiver.add(message_of(Op::Recv, target, 0));
      move([&] { return sent.size() == received.size() && sent.size() == static_cast<size_t>(i) + 1; });
    }
    const auto delivered = message_of(Op::Send, data, 1), late = message_of(Op::Send, other, 1);
    sender.add(delivered);
    sender.add(late);
    receiver.add(message_of(Op::Recv, target, 0));
    move([&] { return received.size() == static_cast<size_t>(before) + 1; });
    sessions[1]->leave();
    CHECK_EQ(sender.absent(*delivered).ranks, 0);
    CHECK_EQ(sender.absent(*late).ranks, 1);
    sender.progress(sent, Mover::Waits);
    CHECK_EQ(sent.size(), received.size());
  }
}

// What it reads ends with the header of a message whose bytes had no room in the channel.
TEST(a_sender_hears_that_a_full_channel_was_read) {
  const Sessions sessions = make_sessions(2, 4096, {false});
  NodeMessages sender(sessions[0]), receiver(sessions[1]);
  const size_t room = sessions[0]->layout().ring_bytes;
  const size_t headers = 2 * (sizeof(MessageHeader) + sizeof(uint64_t));
  std::vector<int> fits((room - headers) / sizeof(int), 5), more(1, 6), first(fits.size()), second(1);
  Messages ended;
  sender.add(message_of(Op::Send, fits, 1));
  sender.add(message_of(Op::Send, more, 1));
  sender.progress(ended, Mover::Other);
  CHECK_EQ(ended.size(), 1u);
  const auto doorbell = [&] { return sessions[0]->self().doorbell.value.load(); };
  const uint32_t before = doorbell();
  receiver.add(message_of(Op::Recv, first, 0));
  receiver.add(message_of(Op::Recv, second, 0));
  receiver.progress(ended, Mover::Other);
  CHECK(first == fits);
  CHECK(second[0] == 0);
  CHECK(doorbell() != before);
}

}  // namespace
}  // namespace ours::testing
