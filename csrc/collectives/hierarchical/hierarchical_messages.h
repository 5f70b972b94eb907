#pragma once

#include <array>
#include <atomic>
#include <memory>

#include "collectives/messages/inbox.h"
#include "collectives/messages/message_carrier.h"
#include "collectives/node/node_messages.h"
#include "collectives/tcp/tcp_messages.h"

namespace ours {

/// Messages of a group on several nodes: through shared memory within a node, over TCP between nodes. A rank waits only
/// where something is expected, and looks elsewhere now and then.
class HierarchicalMessages final : public MessageCarrier {
 public:
  /// `session` knows its ranks' numbers in the group (NodeSession::widen()). For the meshes see TcpMessages.
  HierarchicalMessages(const std::shared_ptr<NodeSession>& session, const std::shared_ptr<TcpMesh>& mesh,
                       const std::shared_ptr<TcpMesh>& calls);

  int size() const override { return tcp_.size(); }
  std::string describe_self() const override { return tcp_.describe_self(); }
  std::string call_roll(int rank) const override {
    return node_.reaches(rank) ? node_.call_roll(rank) : tcp_.call_roll(rank);
  }

  void reach(const Message& message) override;
  void add(const std::shared_ptr<Message>& message) override;
  bool progress(Messages& ended, Mover mover) override;
  Messages take_all() override;
  Messages posted() const override;
  bool empty() const override { return node_.empty() && tcp_.empty(); }
  void check_can_complete(const Message& message) override;

  void check() override;
  bool failed() const override { return node_.failed() || tcp_.failed(); }
  void fail(FailureKind kind, const std::string& message) noexcept override;
  void fail(const std::exception_ptr& error) noexcept override;

  uint32_t heard() const override { return node_.heard() + tcp_.heard(); }
  void ring() override;
  bool rest(const std::function<bool()>& ready) override;

  bool in_child() const override { return tcp_.in_child(); }
  void leave() noexcept override { tcp_.leave(); }

 private:
  /// Where a message moves.
  enum Way { kNode, kTcp, kBoth, kWays };
  Way way_of(const Message& message) const;
  bool uses(Way way) const { return under_way_[way].load() + under_way_[kBoth].load() != 0; }
  bool watch_both(const std::function<bool()>& ready);

  const std::shared_ptr<NodeSession> session_;
  const std::shared_ptr<TcpMesh> mesh_;
  const std::shared_ptr<Inbox> inbox_;
  NodeMessages node_;
  TcpMessages tcp_;
  Clock::time_point next_look_{};                    ///< when to look at connections on which nothing is expected
  std::array<std::atomic<int>, kWays> under_way_{};  ///< messages that are posted
  std::atomic<int> resting_{0};                      ///< threads in rest()
};

std::shared_ptr<PointToPoint> make_hierarchical_point_to_point(const std::shared_ptr<NodeSession>& session,
                                                               const std::shared_ptr<TcpMesh>& messages,
                                                               const std::shared_ptr<TcpMesh>& calls);

}  // namespace ours
