#pragma once

#include <array>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "collectives/messages/inbox.h"
#include "collectives/messages/message_carrier.h"
#include "collectives/node/faster_way.h"
#include "collectives/node/shared_write.h"
#include "transport/node/channel.h"
#include "transport/node/core_spread.h"
#include "transport/node/node_session.h"

namespace ours {

/// Messages between ranks that share memory. On a channel, a message is a header followed by its bytes, or by none if
/// it does not fit and the receiver reads it where it lies in the sender's memory. A message that the inbox does not
/// take in yet stays in the channel, which holds its sender back.
class NodeMessages final : public MessageCarrier {
 public:
  explicit NodeMessages(const std::shared_ptr<NodeSession>& session, Setting write_around = options().write_around);
  /// For the messages of the node's ranks in a larger group, which `inbox` is of.
  NodeMessages(std::shared_ptr<NodeSession> session, std::shared_ptr<Inbox> inbox,
               Setting write_around = options().write_around);

  int size() const override { return session_->size(); }
  std::string describe_self() const override { return session_->describe(session_->rank()); }
  std::string call_roll(int rank) const override { return session_->call_roll({local_of(rank)}); }

  void add(const std::shared_ptr<Message>& message) override;
  bool progress(Messages& ended, Mover mover) override;
  Messages take_all() override;
  Messages posted() const override;
  bool empty() const override;
  void check_can_complete(const Message& message) override { absent(message).check(message, size()); }

  /// Whether that rank of the group is one of the node.
  bool reaches(int rank) const { return local_of(rank) >= 0; }
  /// The messages that are on their way to others.
  void append_sends(Messages& all) const;
  /// Those of this node's ranks that have left. Throws PeerError if one of them died.
  Absent absent(const Message& message) const;
  /// Sleeps until there may be something to move, at most for `limit`, and not at all if ready() holds.
  void doze(std::chrono::nanoseconds limit, const std::function<bool()>& ready) { sleep_on(doorbell(), limit, ready); }

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
  struct Header {
    MessageHeader message;
    uint64_t address;  ///< of the message in the sender's memory; 0: its bytes follow
  };
  /// A message that could go either way, which is timed from when the receiver has seen it.
  struct Trial {
    bool lends;
    uint64_t header_end;  ///< where its header ends in the channel
    std::optional<Clock::time_point> began{};
  };
  struct Outgoing {
    Channel channel;
    bool reserved = false;                        ///< its memory was taken
    bool lends = false;                           ///< the receiver reads the first message in this rank's memory
    uint64_t taken = 0;                           ///< how many it has read there
    std::optional<Trial> trial{};                 ///< the first message, if it is one
    WriteTimes times{};                           ///< of the ways to write into the channel
    std::list<std::shared_ptr<Message>> sends{};  ///< in the order posted. An empty deque takes memory
  };
  struct Incoming {
    Channel channel;
    size_t bytes = 0;      ///< of the message that is arriving,
    size_t moved = 0;      ///< and how many of them are here
    uint64_t address = 0;  ///< as in its header
  };

  /// The rank in the node of a rank of the group; -1 if it is not there.
  int local_of(int rank) const {
    return static_cast<size_t>(rank) < locals_.size() ? locals_[static_cast<size_t>(rank)] : -1;
  }
  SleepWord& doorbell() const { return session_->self().doorbell; }
  /// Whether that rank has the message, although progress() has not seen that yet.
  bool is_delivered(int to, const Message& message) const;
  bool push(int to, Mover mover, Messages& ended);
  /// Whether a thread that waits may begin to send what does not fit into the channel through it all the same. Both
  /// ranks copy at once then, which takes so much of two cores that it is done only if they have them, and this rank
  /// has nothing else to move.
  bool may_copy() const { return session_->have_own_cores() && inbox_->empty(); }
  /// Chooses how the first message to that rank goes: if it may be copied as well as lent, in the way that has taken
  /// less time. Returns false if that is left to a thread that waits.
  bool choose_way(int to, Mover mover);
  /// Whether the first message, all of which this rank has moved, has ended: one that is timed ends when the receiver
  /// has all of it, whichever way it goes.
  static bool has_ended(const Outgoing& out) { return !out.trial || out.channel.writable() == out.channel.capacity(); }
  static void begin_trial(Outgoing& out);
  void end_trial(Outgoing& out, size_t bytes);
  FasterWay& faster_way(size_t bytes);
  /// Moves a part of the first message. Returns how many bytes have moved.
  size_t push_part(int to, Message& message);
  /// The same for the message that is arriving from `from`.
  size_t pull_part(int from);
  bool pull(int from);
  /// Writes up to `bytes` bytes into the channel, in the way that is faster for this peer: whether the two share a
  /// cache differs from pair to pair. Returns how many.
  size_t write(Outgoing& out, const std::byte* data, size_t bytes) const;
  /// Copies into a channel or out of it, as long as copy(at, n) says that it could, and about as much as it holds,
  /// since other messages move in between. Where ranks have cores of their own, each part is announced, so that the two
  /// copy at the same time, one a few parts behind the other. Returns how many bytes.
  template <class Copy>
  size_t in_parts(int peer, size_t bytes, Copy&& copy);
  /// Takes the next header from the channel if its message is to be taken in.
  bool begin(int from);

  const std::shared_ptr<NodeSession> session_;
  const Setting write_around_;
  std::mutex spread_mutex_;
  CoreSpread spread_;                   // of the ranks that wait for messages; settle() needs its mutex
  const std::shared_ptr<Inbox> inbox_;  // knows ranks by their numbers in the group,
  std::vector<int> locals_;             // for which these are the ranks in the node
  std::vector<Outgoing> out_;           // by destination
  std::vector<Incoming> in_;            // by source
  std::array<FasterWay, 16> ways_;      // to copy a message that does not fit, or to lend it; by size
};

std::shared_ptr<PointToPoint> make_node_point_to_point(const std::shared_ptr<NodeSession>& session,
                                                       Setting write_around = options().write_around);

}  // namespace ours
