#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <vector>

#include "collectives/point_to_point.h"
#include "transport/channel.h"

namespace ours {

/// A posted send or receive.
class Message final : public Transfer {
 public:
  Message(Op op, void* data, size_t bytes, DType dtype, int peer, int tag, Deadline deadline, TransferDone done)
      : op(op),
        data(static_cast<std::byte*>(data)),
        bytes(bytes),
        dtype(dtype),
        peer(peer),
        tag(tag),
        deadline(deadline),
        on_done(std::move(done)) {}

  bool done() const override { return done_.load(std::memory_order_acquire); }
  std::exception_ptr error() const override { return done() ? error_ : nullptr; }
  int source() const override { return op == Op::Send ? -1 : peer; }

  /// "recv from rank 1 with tag 0 (4 x float32)"
  std::string describe() const;

  /// Ends the transfer. Returns what is to be called without any lock.
  TransferCallbacks finish();
  void set_error(std::exception_ptr error) { error_ = std::move(error); }

  const Op op;
  std::byte* const data;  // of a send: only read
  const size_t bytes;
  const DType dtype;
  int peer;  // destination, source, or kAnySource until a message was matched
  const int tag;
  const Deadline deadline;
  size_t moved = 0;  // of a send: bytes of the message in the channel so far
  bool header_sent = false;

 private:
  TransferDone on_done;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

/// The matching and moving of one rank's messages over its channels; single-threaded, never waits.
///
/// On a channel a message is a header (size, tag, dtype) and then its bytes. A message that finds no receive posted for
/// it stays in the channel, which holds back its sender; but if another receive waits for the same sender it is set
/// aside in memory, so that tags may be received in any order.
class MessageQueue {
 public:
  using Messages = std::deque<std::shared_ptr<Message>>;

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
  struct Header {
    uint64_t bytes;
    int32_t tag;
    uint32_t dtype;
  };

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

  /// Takes the first receive that matches out of recvs_; null if there is none.
  std::shared_ptr<Message> match(int from, int tag);

  /// Serves `recv` from what was set aside, as far as that has arrived.
  bool take_early(const std::shared_ptr<Message>& recv);
  bool expects(int from) const;
  void check_fits(const Message& recv, const Header& header, int from) const;

  NodeSession& session_;
  std::vector<Channel> out_;
  std::vector<Channel> in_;
  std::vector<bool> reserved_;                               // outgoing rings whose memory was taken
  std::vector<std::deque<std::shared_ptr<Message>>> sends_;  // by destination, in the order posted
  std::list<std::shared_ptr<Message>> recvs_;                // in the order posted
  std::vector<Incoming> incoming_;                           // by source
  Messages delivered_;                                       // receives that were served when posted
};

}  // namespace ours
