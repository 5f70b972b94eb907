#include "collectives/tcp/tcp_messages.h"

#include <memory>
#include <vector>

#include "support/message_ranks.h"
#include "support/tcp_ranks.h"

namespace ours::testing {
namespace {

std::shared_ptr<Message> message(Op op, std::vector<int>& data, int peer) {
  return std::make_shared<Message>(op, data.data(), data.size() * sizeof(int), DType::Int32, peer, 0, soon(), nullptr);
}

/// A message from rank 0 to rank 1. One thread is both ranks, and what else uses their meshes, such as the thread that
/// closes idle connections.
struct Sending {
  Sending() {
    for (const auto& mesh : meshes) carriers.push_back(std::make_unique<TcpMessages>(mesh, mesh));
    for (size_t r = 0; r < 2; ++r) {
      carriers[r]->reach(*messages[r]);
      carriers[r]->add(messages[r]);
    }
  }

  bool progress(size_t rank) { return carriers[rank]->progress(ended[rank], Mover::Waits); }

  /// Rank `leaver` leaves, and only the mesh of the other one hears of that.
  void leave(size_t leaver) {
    carriers[leaver]->leave();
    TcpMesh& mesh = *meshes[1 - leaver];
    wait_until([&] {
      mesh.look();
      const TcpMesh::Lock lock = mesh.lock();
      const int peer = static_cast<int>(leaver);
      const TcpConnections& connections = mesh.endpoint().connections();
      return connections.left(peer).has_value();
    });
  }

  /// What has ended on its own is not an error, although the peer has left since.
  void check_ends(size_t rank) {
    carriers[rank]->check_can_complete(*messages[rank]);
    CHECK(progress(rank));
    CHECK(ended[rank].size() == 1 && ended[rank][0] == messages[rank]);
    CHECK(received == sent);
  }

  const Meshes meshes = make_meshes(2);
  std::vector<std::unique_ptr<TcpMessages>> carriers;
  std::vector<int> sent = numbers(7, 3'000'000);  // more than the system takes at a time
  std::vector<int> received = std::vector<int>(sent.size());
  const std::shared_ptr<Message> messages[2] = {message(Op::Send, sent, 1), message(Op::Recv, received, 0)};
  Messages ended[2];
};

TEST(a_send_that_another_thread_has_ended_does_not_fail_when_its_receiver_leaves) {
  Sending all;
  wait_until([&] {
    all.meshes[0]->look();
    all.progress(1);
    return !all.ended[1].empty();
  });
  all.leave(1);
  all.check_ends(0);
}

TEST(a_receive_that_another_thread_has_ended_does_not_fail_when_its_sender_leaves) {
  Sending all;
  wait_until([&] {
    all.progress(0);
    all.progress(1);
    return all.received[0] == all.sent[0];
  });
  wait_until([&] {
    all.progress(0);
    all.meshes[1]->look();
    return !all.ended[0].empty();
  });
  all.leave(0);
  wait_until([&] {
    all.meshes[1]->look();
    return all.received == all.sent;
  });
  all.check_ends(1);
}

}  // namespace
}  // namespace ours::testing
