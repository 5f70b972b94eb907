#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "collectives/messages/inbox.h"
#include "collectives/messages/message_carrier.h"
#include "transport/tcp/tcp_mesh.h"
#include "transport/wait.h"

namespace ours {

/// Messages over TCP. They have a mesh of their own, so that they and collectives need not wait for each other.
///
/// A message is one frame on its peer's data stream, sent whether or not there is a receive for it. Until the inbox
/// takes it in, the receiver's system buffers some of it and then holds the sender back.
class TcpMessages final : public MessageCarrier {
 public:
  /// `calls` is the mesh of the group's collectives, which learns of peers that this mesh is not connected to.
  TcpMessages(const std::shared_ptr<TcpMesh>& mesh, const std::shared_ptr<TcpMesh>& calls);
  /// For the messages that come and go over the network, where `inbox` is for others, too.
  TcpMessages(std::shared_ptr<TcpMesh> mesh, const std::shared_ptr<TcpMesh>& calls, std::shared_ptr<Inbox> inbox);
  ~TcpMessages() override { mesh_->leave(); }
  TcpMessages(const TcpMessages&) = delete;
  TcpMessages& operator=(const TcpMessages&) = delete;

  int size() const override { return mesh_->size(); }
  std::string call_roll(int rank) const override;
  std::string describe_self() const override { return mesh_->describe_self(); }

  void reach(const Message& message) override;
  void add(const std::shared_ptr<Message>& message) override;
  bool progress(Messages& ended, Mover mover) override;
  Messages take_all() override;
  Messages posted() const override;
  bool empty() const override { return inbox_->empty() && sends_.empty(); }
  void check_can_complete(const Message& message) override;

  static std::shared_ptr<Inbox> make_inbox(const std::shared_ptr<TcpMesh>& mesh);
  /// The messages that are on their way to others.
  void append_sends(Messages& all) const;
  /// Those that have left of the ranks for which may_send(rank) holds. Throws PeerError if one of them died.
  Absent absent(const Message& message, const std::function<bool(int)>& may_send);
  /// Throws PeerError if a connection is broken on which something is under way.
  void check_connections();
  /// Looks whether there is something to move, without waiting.
  bool has_heard();

  void check() override { mesh_->check_usable(); }
  bool failed() const override { return mesh_->failure().failed(); }
  void fail(FailureKind kind, const std::string& message) noexcept override { mesh_->fail(kind, message); }
  void fail(const std::exception_ptr& error) noexcept override { mesh_->fail(error); }

  uint32_t heard() const override { return bell_.value.load(std::memory_order_seq_cst); }
  void ring() override;
  bool rest(const std::function<bool()>& ready) override;

  bool in_child() const override { return mesh_->in_child(); }
  void leave() noexcept override { mesh_->leave(); }

 private:
  /// A message on its way to a peer.
  struct Outgoing {
    std::shared_ptr<Message> message;
    size_t done = 0;  ///< 1 once all is in the system's hands
  };

  bool collect_sent(Messages& ended);
  bool pull(int from);
  bool begin(int from);
  void send_to_self(const Message& message);
  /// The reason why nothing can come from that rank, or go to it, any more; null while it can.
  const char* absence(int rank, bool sending) const;
  /// Whether another thread that uses the mesh has moved a message to its end since progress(). The peer may have left
  /// after that, and it is too early to say that the message cannot be completed.
  bool has_news() const;
  bool watch_connections(const std::function<bool()>& ready);

  const std::shared_ptr<TcpMesh> mesh_;
  TcpEndpoint& endpoint_;        // used with the lock of the mesh,
  TcpConnections& connections_;  // like its connections
  const std::weak_ptr<TcpMesh> calls_;
  // Guarded by the lock of PostedMessages, except what the mesh writes, which its own lock guards.
  const std::shared_ptr<Inbox> inbox_;
  std::vector<uint64_t> numbers_;  // the number of the last message to each rank
  std::list<Outgoing> sends_;
  std::vector<size_t> arrived_;  // by source: 1 once the arriving message is complete
  SleepWord bell_{};
  std::atomic<bool> watched_{false};  // some thread sleeps on the connections
};

std::shared_ptr<PointToPoint> make_tcp_point_to_point(const std::shared_ptr<TcpMesh>& messages,
                                                      const std::shared_ptr<TcpMesh>& calls);

}  // namespace ours
