#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "collectives/messages/message.h"
#include "transport/node/channel.h"

namespace ours {

/// The matching and moving of one rank's messages over its channels; single-threaded, never waits.
///
/// On a channel a message is a header (size, tag, dtype) and then its bytes. A message that finds no receive posted for
/// it stays in the channel, which holds back its sender; but if another receive waits for the same sender it is set
/// aside in memory, so that tags may be received in any order.
class MessageQueue {
 public:
  explicit MessageQueue(NodeSession& session);

  void add(std::shared_ptr<Message> message);

  /// Moves everything as far as it goes and appends the messages that ended to `ended`; the caller must finish() them.
  /// Returns whether anything moved. Throws MismatchError where a message does not fit the receive that it matches.
  bool progress(Messages& ended);

  /// Takes out all messages.
  Messages take_all();

  /// All that are posted and have not ended.
  Messages posted() const;

  bool empty() const;

  /// Whether anything from that rank waits in its channel.
  bool has_input(int from) const { return in_[static_cast<size_t>(from)].readable() != 0; }

 private:
  using Header = MessageHeader;

  /// A message that was set aside, whole or still arriving.
  struct Early {
    Header header;
    std::vector<std::byte> bytes;
  };

  /// What arrives from one rank.
  struct Incoming {
    bool active = false;  ///< a header was taken, its bytes are not all here
    Header header{};
    size_t moved = 0;
    std::shared_ptr<Message> target;  ///< null while the message goes to the back of `early`
    std::deque<Early> early;
  };

  bool push(int to, Messages& ended);
  bool pull(int from, Messages& ended);

  /// Takes the next header from the channel, if someone wants its message or another from this rank.
  bool begin(int from);

  /// Serves `recv` from what was set aside, as far as that has arrived.
  bool take_early(const std::shared_ptr<Message>& recv);
  void check_fits(const Message& recv, const Header& header, int from) const;

  NodeSession& session_;
  std::vector<Channel> out_;
  std::vector<Channel> in_;
  std::vector<bool> reserved_;                               // outgoing rings whose memory was taken
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;  // by destination, in the order posted
  PostedReceives recvs_;
  std::vector<Incoming> incoming_;  // by source
  Messages delivered_;              // receives that were served when posted
};

}  // namespace ours
