#include "support/message_ranks.h"

#include "collectives/hierarchical/hierarchical_messages.h"
#include "collectives/node/node_messages.h"
#include "collectives/tcp/tcp_messages.h"
#include "support/hierarchical_ranks.h"
#include "support/tcp_ranks.h"

namespace ours::testing {

TransferLimitPtr soon() { return std::make_shared<TransferLimit>(std::chrono::minutes(1)); }

Port::Port(const std::shared_ptr<NodeSession>& session) : Port(make_node_point_to_point(session)) {}

Port::~Port() {
  if (!p2p) return;
  p2p->close();
  p2p->wait_closed(std::chrono::seconds(30));
}

std::shared_ptr<Transfer> Port::send(const std::vector<int>& data, int to, int tag) {
  return p2p->send(const_span(data), DType::Int32, to, tag, soon(), nullptr);
}

std::shared_ptr<Transfer> Port::recv(std::vector<int>& data, int from, int tag, std::function<void()> then) {
  TransferDone done;
  if (then) done = [then = std::move(then)](const Transfer&) { return then; };
  const auto posting = p2p;  // `then` may drop it
  return posting->recv(span(data), DType::Int32, from, tag, soon(), std::move(done));
}

void Port::wait(const std::shared_ptr<Transfer>& transfer) {
  p2p->wait(*transfer);
  if (transfer->error()) std::rethrow_exception(transfer->error());
}

namespace {

void run_on_node(int n, const Body& body, bool direct) {
  const auto run = [&](const std::shared_ptr<NodeSession>& session) {
    body({session->rank(), make_node_point_to_point(session), [session] { session->leave(); }});
  };
  run_sessions(n, 4096, run, {direct});
}

void run_over_tcp(int n, const Body& body) {
  const auto calls = make_meshes(n);
  const auto messages = make_meshes(n);
  std::vector<std::shared_ptr<PointToPoint>> all;  // here, since a rank that returns has not left
  for (size_t r = 0; r < messages.size(); ++r) {
    TcpMesh::share_failures(messages[r], calls[r]);
    all.push_back(make_tcp_point_to_point(messages[r], calls[r]));
  }
  run_ranks(n, [&](int rank) {
    const auto& p2p = all[static_cast<size_t>(rank)];
    body({rank, p2p, [p2p] { p2p->close(); }});
  });
}

void run_over_nodes(int n, const Body& body) {
  const NodeOf by_twos = [](int rank) { return rank / 2; };
  HierarchicalConfig config;
  config.chunk = 4096;
  const HierarchicalRanks ranks(n, by_twos, config);
  const auto messages = make_meshes(n);
  std::vector<std::shared_ptr<PointToPoint>> all;
  std::vector<std::shared_ptr<HierarchicalGroup>> groups;
  for (int rank = 0; rank < n; ++rank) {
    const auto r = static_cast<size_t>(rank);
    TcpMesh::share_failures(messages[r], ranks.meshes[r]);
    groups.push_back(ranks.group(rank));
    all.push_back(make_hierarchical_point_to_point(ranks.sessions[r], messages[r], ranks.meshes[r]));
  }
  run_ranks(n, [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    body({rank, all[r], [&, r] {
            all[r]->close();
            groups[r]->leave();
          }});
  });
}

void run_ranks_over(Carrier carrier, int n, const Body& body) {
  switch (carrier) {
    case Carrier::Node:
      return run_on_node(n, body, true);
    case Carrier::Segment:
      return run_on_node(n, body, false);
    case Carrier::Tcp:
      return run_over_tcp(n, body);
    case Carrier::Nodes:
      return run_over_nodes(n, body);
  }
}

}  // namespace

void run_ranks(Carrier carrier, int n, const Body& body) {
  try {
    run_ranks_over(carrier, n, body);
  } catch (const Failure& e) {
    const char* const names[] = {"shared memory", "a segment", "tcp", "nodes"};
    throw Failure(names[static_cast<int>(carrier)] + (": " + std::string(e.what())));
  }
}

void run_ranks(int n, const Body& body) {
  for (const Carrier carrier : kCarriers) run_ranks(carrier, n, body);
}

std::vector<int> numbers(int seed, size_t count) {
  std::vector<int> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = seed * 1000003 + static_cast<int>(i);
  return all;
}

}  // namespace ours::testing
