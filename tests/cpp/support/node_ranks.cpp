#include "support/node_ranks.h"

#include <algorithm>
#include <utility>

namespace ours::testing {

void sync(NodeBarrier& barrier, Deadline deadline, const Shown* shows) {
  barrier.arrive(shows);
  barrier.await(deadline, 1, [] { return "a test"; });
}

uint32_t last_synchronisation(const NodeSession& session) {
  const auto number = [&](int parity) { return session.self().arrival[parity].number.load(); };
  return std::max(number(0), number(1));
}

Sessions make_sessions(int n, size_t chunk, const NodeTerms& terms) {
  std::vector<std::shared_ptr<ProcessHeaps>> heaps;
  for (int r = 0; r < n; ++r) heaps.push_back(std::make_shared<ProcessHeaps>());
  return make_sessions(heaps, chunk, terms);
}

Sessions make_sessions(const std::vector<std::shared_ptr<ProcessHeaps>>& heaps, size_t chunk, const NodeTerms& terms) {
  const auto n = static_cast<int>(heaps.size());
  NodeConfig config = chunk == 0 ? NodeConfig::from_options(n) : NodeConfig{chunk, 4096};
  config.direct = terms.direct;
  config.domains = terms.domains;
  Sessions sessions{NodeSession::create(0, n, config, heaps[0])};
  for (int r = 1; r < n; ++r) {
    sessions.push_back(std::make_shared<NodeSession>(r, n, sessions[0]->memory(), heaps[static_cast<size_t>(r)]));
  }
  for (size_t r = 0; r < terms.sockets.size(); ++r) sessions[0]->block(static_cast<int>(r)).socket = terms.sockets[r];
  for (const auto& session : sessions) session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
  return sessions;
}

std::string small_node_rules(size_t chunk) {
  return chunk == 0 ? "" : "node_reduce bytes<=" + std::to_string(chunk / 4) + " whole;node_reduce direct";
}

void run_sessions(int n, size_t chunk, const std::function<void(std::shared_ptr<NodeSession>)>& fn,
                  const NodeTerms& terms) {
  const Sessions sessions = make_sessions(n, chunk, terms);
  run_ranks(n, [&](int rank) { fn(sessions[static_cast<size_t>(rank)]); });
}

void run_counted(int n, size_t chunk, const CountedRank& fn, bool direct) {
  const auto run = [&](const std::shared_ptr<NodeSession>& session) {
    NodeGroup group(session, small_node_rules(chunk));
    uint32_t before = last_synchronisation(*session);
    fn(group, [&] {
      const uint32_t last = last_synchronisation(*session);
      return last - std::exchange(before, last);
    });
  };
  run_sessions(n, chunk, run, {direct});
}

}  // namespace ours::testing
