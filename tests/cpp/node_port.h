#pragma once

#include <memory>
#include <vector>

#include "collectives/node_messages.h"
#include "node_ranks.h"

// What the tests of point-to-point messages share.

namespace ours::testing {

/// Long enough for a slow machine, and an end for a test that hangs.
inline Deadline soon() { return Deadline::after(std::chrono::minutes(1)); }

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

inline std::vector<int> numbers(int seed, size_t count) {
  std::vector<int> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = seed * 1000003 + static_cast<int>(i);
  return all;
}

}  // namespace ours::testing
