#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "collectives/node/node_group.h"
#include "collectives/node/node_messages.h"
#include "support/ranks.h"

namespace ours::testing {

/// Runs fn(session) on `n` ranks as threads that share one segment of the given chunk size.
inline std::vector<std::exception_ptr> run_sessions_catching(
    int n, size_t chunk, const std::function<void(std::shared_ptr<NodeSession>)>& fn) {
  NodeConfig config = NodeConfig::from_options(n);
  if (chunk != 0) config = NodeConfig{chunk, chunk / 4, 4096};
  std::vector<std::shared_ptr<NodeSession>> sessions;
  sessions.push_back(NodeSession::create(0, n, config));
  for (int r = 1; r < n; ++r) sessions.push_back(std::make_shared<NodeSession>(r, n, sessions[0]->memory()));
  return run_ranks_catching(n, [&](int rank) {
    auto session = sessions[static_cast<size_t>(rank)];
    session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
    fn(session);
  });
}

inline void run_sessions(int n, size_t chunk, const std::function<void(std::shared_ptr<NodeSession>)>& fn) {
  const auto errors = run_sessions_catching(n, chunk, fn);
  for (size_t r = 0; r < errors.size(); ++r) {
    if (errors[r]) throw Failure("rank " + std::to_string(r) + ": " + message_of(errors[r]));
  }
}

inline Call call_of(Op op, DType dtype, uint64_t seq, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  return Call{op, dtype, seq, Deadline::after(timeout)};
}

}  // namespace ours::testing
