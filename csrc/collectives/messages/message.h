#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <string>

#include "collectives/messages/point_to_point.h"

namespace ours {

/// The header that precedes a message.
struct MessageHeader {
  uint64_t bytes;
  int32_t tag;
  uint32_t dtype;
};

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
  MessageHeader header() const { return {bytes, tag, static_cast<uint32_t>(dtype)}; }

  /// Ends the transfer. The caller must call what it returns without holding any lock.
  TransferCallbacks finish();
  void set_error(std::exception_ptr error) { error_ = std::move(error); }

  const Op op;
  std::byte* const data;  // for a send: only read
  const size_t bytes;
  const DType dtype;
  int peer;  // destination, source, or kAnySource until a message has matched
  const int tag;
  const TransferLimitPtr limit;
  size_t moved = 0;  // for a send: bytes of the message in the channel so far
  bool header_sent = false;

 private:
  TransferDone on_done;
  std::exception_ptr error_;
  std::atomic<bool> done_{false};
};

using Messages = std::deque<std::shared_ptr<Message>>;

}  // namespace ours
