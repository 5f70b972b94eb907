#pragma once

#include <memory>
#include <vector>

#include "collectives/node/node_messages.h"
#include "collectives/tcp/tcp_messages.h"
#include "support/node_ranks.h"
#include "support/tcp_ranks.h"

// Helpers for the tests of point-to-point messages.

namespace ours::testing {

/// Long enough for a slow machine, and short enough to end a test that hangs.
inline TransferLimitPtr soon() { return std::make_shared<TransferLimit>(std::chrono::minutes(1)); }

/// A rank's end of the messages of a group, for tensors of ints.
struct Port {
  explicit Port(const std::shared_ptr<NodeSession>& session) : Port(make_node_point_to_point(session)) {}
  explicit Port(std::shared_ptr<PointToPoint> messages) : p2p(std::move(messages)) {}
  ~Port() {
    p2p->close();
    p2p->wait_closed(std::chrono::seconds(30));
  }

  std::shared_ptr<Transfer> send(const std::vector<int>& data, int to, int tag = 0) {
    return p2p->send(ConstSpan{data.data(), data.size() * sizeof(int)}, DType::Int32, to, tag, soon(), nullptr);
  }
  std::shared_ptr<Transfer> recv(std::vector<int>& data, int from, int tag = 0) {
    return p2p->recv(Span{data.data(), data.size() * sizeof(int)}, DType::Int32, from, tag, soon(), nullptr);
  }
  void wait(const std::shared_ptr<Transfer>& transfer) {
    p2p->wait(*transfer);
    if (transfer->error()) std::rethrow_exception(transfer->error());
  }

  std::shared_ptr<PointToPoint> p2p;
};

/// One rank's part of a test.
struct Rank {
  int rank;
  std::shared_ptr<PointToPoint> p2p;
  std::function<void()> leave;
};
using Body = std::function<void(const Rank&)>;

/// The carrier of the messages. The rings in shared memory hold 4 KiB.
enum class Carrier { Node, Tcp };

inline std::vector<std::exception_ptr> run_on_node(int n, const Body& body) {
  return run_sessions_catching(n, 4096, [&](const std::shared_ptr<NodeSession>& session) {
    body({session->rank(), make_node_point_to_point(session), [session] { session->leave(); }});
  });
}

inline std::vector<std::exception_ptr> run_over_tcp(int n, const Body& body) {
  const auto calls = make_meshes(n);
  const auto messages = make_meshes(n);
  std::vector<std::shared_ptr<PointToPoint>> all;  // here, since a rank that returns has not left
  for (size_t r = 0; r < messages.size(); ++r) {
    TcpMesh::share_failures(messages[r], calls[r]);
    all.push_back(make_tcp_point_to_point(messages[r], calls[r]));
  }
  return run_ranks_catching(n, [&](int rank) {
    const auto& p2p = all[static_cast<size_t>(rank)];
    body({rank, p2p, [p2p] { p2p->close(); }});
  });
}

/// Runs `body` on every rank.
inline void run_ranks(Carrier carrier, int n, const Body& body) {
  const auto errors = carrier == Carrier::Tcp ? run_over_tcp(n, body) : run_on_node(n, body);
  for (size_t r = 0; r < errors.size(); ++r) {
    if (!errors[r]) continue;
    throw Failure(std::string(carrier == Carrier::Tcp ? "tcp" : "shared memory") + ", rank " + std::to_string(r) +
                  ": " + message_of(errors[r]));
  }
}
/// The same with each carrier in turn.
inline void run_ranks(int n, const Body& body) {
  for (const Carrier carrier : {Carrier::Node, Carrier::Tcp}) run_ranks(carrier, n, body);
}

inline std::vector<int> numbers(int seed, size_t count) {
  std::vector<int> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = seed * 1000003 + static_cast<int>(i);
  return all;
}

}  // namespace ours::testing
