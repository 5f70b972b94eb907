#include "collectives/messages/message.h"

#include <utility>

namespace ours {

std::string Message::describe() const {
  const size_t element = size_of(dtype);
  const std::string whom = peer == kAnySource ? "any rank" : "rank " + std::to_string(peer);
  return std::string(op == Op::Send ? "send to " : "recv from ") + whom + " with tag " + std::to_string(tag) + " (" +
         std::to_string(bytes / element) + " x " + name_of(dtype) + ")";
}

TransferCallbacks Message::finish() {
  // Release: a thread that sees done() also sees the bytes and the error.
  done_.store(true, std::memory_order_release);
  const TransferDone done = std::exchange(on_done, nullptr);
  return done ? done(*this) : nullptr;
}

}  // namespace ours
