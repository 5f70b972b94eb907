#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "collectives/hierarchical/node_map.h"
#include "common/deadline.h"
#include "transport/node/node_session.h"
#include "transport/tcp/tcp_call.h"

namespace ours {

/// A rank that waits for its node's ranks looks after its connections from time to time, and one that waits for the
/// network looks after its node. So a failure anywhere reaches all ranks. If a rank is late because it waits for
/// another node, that node is blamed and not the rank.
class NodeWatch final : public NodeLookout {
 public:
  /// Looks out for the session until it ends.
  NodeWatch(const NodeMap& map, std::shared_ptr<NodeSession> session);
  NodeWatch(const NodeWatch&) = delete;
  NodeWatch& operator=(const NodeWatch&) = delete;
  ~NodeWatch() override;

  /// Sets the operation that is under way over the network, or null.
  void set_call(TcpCall* call) { call_ = call; }

  /// Called while this rank waits for the network: throws if one of its node's ranks has failed or will never come.
  void look_at_node();

  // Called while it waits in its node.
  void look_around(const std::vector<int>& absent) override;
  Culprits culprits(const std::vector<int>& absent) override;

 private:
  /// The ranks for which the absent ranks of this node wait, as numbers in the group; the absent ranks themselves if
  /// they do not say.
  std::vector<uint32_t> causes_of(const std::vector<int>& absent) const;
  /// Tells the node's ranks for which ranks this one waits.
  void publish_causes();

  const NodeMap& map_;
  const std::shared_ptr<NodeSession> session_;
  TcpCall* call_ = nullptr;
  Clock::time_point next_look_{};
};

}  // namespace ours
