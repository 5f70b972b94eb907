#include "collectives/hierarchical/hierarchical_messages.h"

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "support/hierarchical_ranks.h"
#include "support/message_ranks.h"

// What the contract of messages (collectives/messages) does not show: where a rank looks while it waits.

namespace ours::testing {
namespace {

constexpr int kSelf = 0, kNeighbour = 1, kElsewhere = 2;

std::shared_ptr<Message> receive(std::vector<int>& data, int from, int tag = 0) {
  const Op op = from == kAnySource ? Op::RecvAnySource : Op::Recv;
  return std::make_shared<Message>(op, data.data(), data.size() * sizeof(int), DType::Int32, from, tag, soon(),
                                   nullptr);
}

/// Rank 0's carrier, and the ends of its neighbour and of a rank on another node.
struct ThreeRanks {
  ThreeRanks() : ranks(3, [](int rank) { return rank / 2; }), messages(make_meshes(3)) {
    for (size_t r = 0; r < 3; ++r) TcpMesh::share_failures(messages[r], ranks.meshes[r]);
    for (int r = 0; r < 3; ++r) groups.push_back(ranks.group(r));
    carrier = std::make_unique<HierarchicalMessages>(ranks.sessions[kSelf], messages[kSelf], ranks.meshes[kSelf]);
    for (const size_t r : {kNeighbour, kElsewhere}) {
      ports.push_back(
          std::make_unique<Port>(make_hierarchical_point_to_point(ranks.sessions[r], messages[r], ranks.meshes[r])));
    }
  }

  Port& port(int rank) { return *ports[static_cast<size_t>(rank - 1)]; }

  /// Whether carrier rests until `event`, which another thread causes once it rests, and not just for 50 ms, as it does
  /// if it looks in the wrong place. A thread that is late now and then does not matter.
  bool notices(const std::function<void()>& event) {
    for (int i = 0; i < 20; ++i) {
      std::atomic<bool> rests{false};
      std::thread other([&] {
        wait_until([&] { return rests.load(); });
        event();
      });
      const uint32_t heard = carrier->heard();
      const bool time_to_look = carrier->rest([&] {
        rests = true;
        return carrier->heard() != heard;
      });
      rests = true;
      other.join();
      Messages ended;
      while (carrier->progress(ended, Mover::Waits)) {
      }
      if (!time_to_look) return true;
    }
    return false;
  }

  /// Lets that rank send something, so that the two are connected.
  void greet(int rank) {
    std::vector<int> data(10);
    const auto sent = numbers(1, 10);
    const auto hello = receive(data, rank);
    carrier->reach(*hello);
    carrier->add(hello);
    const auto sending = port(rank).send(sent, kSelf);
    Messages ended;
    wait_until([&] {
      carrier->progress(ended, Mover::Waits);
      return !ended.empty();
    });
    port(rank).wait(sending);  // what it sends may have come before its thread is done with it
  }

  void leave(int rank) {
    ports[static_cast<size_t>(rank - 1)].reset();
    groups[static_cast<size_t>(rank)]->leave();
  }

  bool can_end(const Message& message) {
    Messages ended;
    carrier->progress(ended, Mover::Waits);
    try {
      carrier->check_can_complete(message);
    } catch (const PeerLeftError&) {
      return false;
    }
    return true;
  }

  bool can_end_for_some_time(const Message& message) {
    const Deadline end = Deadline::after(std::chrono::milliseconds(100));
    while (!end.passed()) {
      if (!can_end(message)) return false;
    }
    return true;
  }

  HierarchicalRanks ranks;
  Meshes messages;
  std::vector<std::shared_ptr<HierarchicalGroup>> groups;
  std::unique_ptr<HierarchicalMessages> carrier;
  std::vector<std::unique_ptr<Port>> ports;
};

TEST(a_rank_that_waits_for_its_node_and_for_others_notices_both) {
  std::vector<std::vector<int>> data(50, std::vector<int>(10));
  std::vector<int> never(10);
  const auto sent = numbers(1, 10);
  ThreeRanks three;
  size_t next = 0;
  std::vector<std::shared_ptr<Transfer>> sends;
  const auto from = [&](int rank) {
    return [&, rank] {
      three.carrier->add(receive(data[next++], rank));
      sends.push_back(three.port(rank).send(sent, kSelf));
    };
  };
  // Connected, and with something expected in both ways.
  for (const int rank : {kNeighbour, kElsewhere}) {
    const auto one = receive(data[next++], rank);
    three.carrier->reach(*one);
    three.carrier->add(one);
    sends.push_back(three.port(rank).send(sent, kSelf));
  }
  three.carrier->add(receive(never, kAnySource, 9));
  Messages ended;
  wait_until([&] {
    three.carrier->progress(ended, Mover::Waits);
    return ended.size() == 2;
  });
  CHECK(three.notices(from(kNeighbour)));
  CHECK(three.notices(from(kElsewhere)));
  CHECK(three.notices([&] { three.groups[kNeighbour]->abort("enough"); }));
}

TEST(a_rank_that_waits_for_its_node_looks_at_the_network_once_another_thread_expects_something_there) {
  ThreeRanks three;
  std::vector<int> first(10), second(10);
  three.carrier->add(receive(first, kNeighbour));
  const auto message = receive(second, kElsewhere);
  three.carrier->reach(*message);
  bool added = false;
  CHECK(three.notices([&] {
    if (!added) three.carrier->add(message);
    added = true;
  }));
}

TEST(all_messages_of_a_group_over_nodes_can_be_taken_out) {
  ThreeRanks three;
  std::vector<std::vector<int>> data(4, std::vector<int>(10));
  const std::vector<int> from{kNeighbour, kElsewhere, kAnySource, kSelf};
  for (size_t i = 0; i < from.size(); ++i) three.carrier->add(receive(data[i], from[i]));
  CHECK(!three.carrier->empty());
  CHECK_EQ(three.carrier->posted().size(), from.size());
  CHECK_EQ(three.carrier->take_all().size(), from.size());
  CHECK(three.carrier->empty());
}

TEST(a_rank_that_waits_for_its_node_hears_of_a_failure_elsewhere) {
  ThreeRanks three;
  run_ranks(3, [&](int rank) { barrier(*three.groups[static_cast<size_t>(rank)], 0); });
  Port port(
      make_hierarchical_point_to_point(three.ranks.sessions[kSelf], three.messages[kSelf], three.ranks.meshes[kSelf]));
  std::vector<int> data(10);
  const auto transfer = port.recv(data, kNeighbour);
  run_ranks(2, [&](int thread) {
    if (thread == 1) return three.groups[kElsewhere]->abort("enough");
    CHECK_CONTAINS(CHECK_THROWS(AbortedError, port.wait(transfer)), "enough");
  });
}

TEST(a_message_from_the_node_comes_although_a_rank_elsewhere_left_and_never_took_its_own) {
  ThreeRanks three;
  three.greet(kElsewhere);
  std::vector<int> data(10);
  const std::vector<int> large(size_t{4} << 20);
  const auto message = receive(data, kNeighbour);
  three.carrier->add(message);
  three.carrier->add(std::make_shared<Message>(Op::Send, const_cast<int*>(large.data()), large.size() * sizeof(int),
                                               DType::Int32, kElsewhere, 0, soon(), nullptr));
  three.leave(kElsewhere);
  CHECK(three.can_end_for_some_time(*message));
  const auto sent = numbers(2, 10);
  const auto sending = three.port(kNeighbour).send(sent, kSelf);
  Messages ended;
  wait_until([&] {
    three.carrier->progress(ended, Mover::Waits);
    return message->done() || !ended.empty();
  });
  CHECK(data == sent);
}

TEST(a_receive_from_any_source_waits_until_ranks_of_all_nodes_have_left) {
  ThreeRanks three;
  three.greet(kElsewhere);
  std::vector<int> data(10);
  const auto message = receive(data, kAnySource);
  three.carrier->add(message);
  three.leave(kElsewhere);
  CHECK(three.can_end_for_some_time(*message));
  three.leave(kNeighbour);
  wait_until([&] { return !three.can_end(*message); });
}

}  // namespace
}  // namespace ours::testing
