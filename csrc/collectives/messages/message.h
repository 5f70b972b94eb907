#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <list>
#include <memory>
#include <string>

#include "collectives/messages/point_to_point.h"

namespace ours {

/// A posted send or receive.
class Message final : public Transfer {
 public:
  Message(Op op, void* data, size_t bytes, DType dtype, int peer, int tag, TransferLimitPtr limit, TransferDone done)
      : op(op),
        data(static_cast<std::byte*>(data)),
        bytes(bytes),
        dtype(dtype),
        peer(peer),
        tag(tag),
        limit(std::move(limit)),
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
  const TransferLimitPtr limit;
  size_t moved = 0;  // of a send: bytes of the message in the channel so far
  bool header_sent = false;

 private:
  TransferDone on_done;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

using Messages = std::deque<std::shared_ptr<Message>>;

/// What precedes a message on its way.
struct MessageHeader {
  uint64_t bytes;
  int32_t tag;
  uint32_t dtype;
};

/// The receives that wait for a message, in the order posted.
class PostedReceives {
 public:
  void add(std::shared_ptr<Message> receive) { receives_.push_back(std::move(receive)); }

  /// Takes out the first receive that matches; null if there is none.
  std::shared_ptr<Message> match(int from, int tag);

  /// Whether any receive may be for a message from that rank.
  bool expects(int from) const;

  bool empty() const { return receives_.empty(); }
  void clear() { receives_.clear(); }
  auto begin() const { return receives_.begin(); }
  auto end() const { return receives_.end(); }

 private:
  std::list<std::shared_ptr<Message>> receives_;
};

/// Whether a message of that header is what `receive` is for.
bool fits(const Message& receive, const MessageHeader& header);

/// What to say where it is not. `receiver` and `sender` are their descriptions.
std::string misfit(const Message& receive, const MessageHeader& header, const std::string& receiver,
                   const std::string& sender);

}  // namespace ours
