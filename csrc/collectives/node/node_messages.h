#pragma once

#include <memory>

#include "collectives/messages/message_carrier.h"
#include "collectives/messages/message_queue.h"
#include "transport/node/node_session.h"

namespace ours {

/// Messages between ranks that share memory.
class NodeMessages final : public MessageCarrier {
 public:
  explicit NodeMessages(std::shared_ptr<NodeSession> session) : session_(std::move(session)), queue_(*session_) {}

  int size() const override { return session_->size(); }
  std::string describe_self() const override { return session_->describe(session_->rank()); }

  void add(const std::shared_ptr<Message>& message) override { queue_.add(message); }
  bool progress(Messages& ended) override { return queue_.progress(ended); }
  Messages take_all() override { return queue_.take_all(); }
  Messages posted() const override { return queue_.posted(); }
  bool empty() const override { return queue_.empty(); }
  void check_can_complete(const Message& message) override;

  void check() override { session_->failure().check(); }
  bool failed() const override { return session_->failure().failed(); }
  void fail(FailureKind kind, const std::string& message) noexcept override { session_->failure().fail(kind, message); }
  void fail(const std::exception_ptr& error) noexcept override { session_->failure().fail(error); }

  uint32_t heard() const override { return doorbell().value.load(std::memory_order_seq_cst); }
  void ring() override { signal(doorbell()); }
  bool rest(const std::function<bool()>& ready) override;

  bool in_child() const override { return session_->in_child(); }
  void leave() noexcept override {}  // the session's other users do

 private:
  SleepWord& doorbell() const { return session_->self().doorbell; }

  const std::shared_ptr<NodeSession> session_;
  MessageQueue queue_;
};

std::shared_ptr<PointToPoint> make_node_point_to_point(std::shared_ptr<NodeSession> session);

}  // namespace ours
