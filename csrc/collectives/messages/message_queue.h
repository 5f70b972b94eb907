#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "collectives/messages/inbox.h"
#include "transport/node/channel.h"

namespace ours {

/// Moves one rank's messages over its channels. Single-threaded, never waits.
///
/// On a channel, a message is a header followed by its bytes. A message that the inbox does not take in yet stays in
/// the channel, which holds its sender back.
class MessageQueue {
 public:
  explicit MessageQueue(NodeSession& session);

  void add(std::shared_ptr<Message> message);

  /// Moves everything as far as it goes and appends the messages that ended to `ended`; the caller must finish() them.
  /// Returns whether anything moved. Throws MismatchError if a message does not fit the receive that it matches.
  bool progress(Messages& ended);

  /// Takes out all messages.
  Messages take_all();
  /// All messages that are posted and have not ended.
  Messages posted() const;
  bool empty() const;

  /// Whether anything from that rank waits in its channel.
  bool has_input(int from) const { return in_[static_cast<size_t>(from)].channel.readable() != 0; }

 private:
  struct Outgoing {
    Channel channel;
    bool reserved = false;                         ///< its memory was taken
    std::deque<std::shared_ptr<Message>> sends{};  ///< in the order posted
  };
  struct Incoming {
    Channel channel;
    size_t bytes = 0;  ///< of the message that is arriving,
    size_t moved = 0;  ///< and how many of them are here
  };

  bool push(int to, Messages& ended);
  bool pull(int from);
  /// Takes the next header from the channel if its message is to be taken in.
  bool begin(int from);

  NodeSession& session_;
  std::vector<Outgoing> out_;  // by destination
  std::vector<Incoming> in_;   // by source
  Inbox inbox_;
};

}  // namespace ours
