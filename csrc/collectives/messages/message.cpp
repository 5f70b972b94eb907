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
  // Release: whoever sees done() sees the bytes and the error.
  done_.store(true, std::memory_order_release);
  const TransferDone done = std::exchange(on_done, nullptr);
  return done ? done(*this) : nullptr;
}

std::shared_ptr<Message> PostedReceives::match(int from, int tag) {
  for (auto it = receives_.begin(); it != receives_.end(); ++it) {
    if ((*it)->tag != tag || ((*it)->peer != from && (*it)->peer != kAnySource)) continue;
    std::shared_ptr<Message> found = std::move(*it);
    receives_.erase(it);
    return found;
  }
  return nullptr;
}

bool PostedReceives::expects(int from) const {
  for (const auto& receive : receives_) {
    if (receive->peer == from || receive->peer == kAnySource) return true;
  }
  return false;
}

bool fits(const Message& receive, const MessageHeader& header) {
  return receive.bytes == header.bytes && static_cast<uint32_t>(receive.dtype) == header.dtype;
}

std::string misfit(const Message& receive, const MessageHeader& header, const std::string& receiver,
                   const std::string& sender) {
  const auto sent = static_cast<DType>(header.dtype);
  return receiver + " posted " + receive.describe() + ", but " + sender + " sent " +
         std::to_string(header.bytes / size_of(sent)) + " x " + name_of(sent) +
         ". Make size and dtype of the two tensors agree";
}

}  // namespace ours
