#include "collectives/messages/message_queue.h"

#include <cstring>
#include <utility>

#include "common/error.h"

namespace ours {

MessageQueue::MessageQueue(NodeSession& session)
    : session_(session),
      reserved_(static_cast<size_t>(session.size()), false),
      sends_(static_cast<size_t>(session.size())),
      incoming_(static_cast<size_t>(session.size())) {
  for (int r = 0; r < session.size(); ++r) {
    out_.emplace_back(session, session.rank(), r);
    in_.emplace_back(session, r, session.rank());
  }
}

void MessageQueue::add(std::shared_ptr<Message> message) {
  if (message->op == Op::Send) {
    const auto to = static_cast<size_t>(message->peer);
    if (!reserved_[to]) {
      const NodeLayout& layout = session_.layout();
      session_.memory()->reserve(layout.channel(static_cast<size_t>(session_.rank()), to), layout.channel_stride());
      reserved_[to] = true;
    }
    sends_[to].push_back(std::move(message));
  } else if (!take_early(message)) {
    recvs_.add(std::move(message));
  }
}

bool MessageQueue::progress(Messages& ended) {
  bool moved = !delivered_.empty();
  ended.insert(ended.end(), delivered_.begin(), delivered_.end());
  delivered_.clear();
  for (int r = 0; r < session_.size(); ++r) {
    moved = push(r, ended) || moved;
    moved = pull(r, ended) || moved;
  }
  return moved;
}

bool MessageQueue::push(int to, Messages& ended) {
  auto& queue = sends_[static_cast<size_t>(to)];
  Channel& channel = out_[static_cast<size_t>(to)];
  bool moved = false;
  while (!queue.empty()) {
    Message& message = *queue.front();
    if (!message.header_sent) {
      const Header header{message.bytes, message.tag, static_cast<uint32_t>(message.dtype)};
      if (channel.writable() < sizeof(header)) break;
      channel.write(&header, sizeof(header));
      message.header_sent = true;
      moved = true;
    }
    const size_t n = channel.write(message.data + message.moved, message.bytes - message.moved);
    message.moved += n;
    moved = moved || n != 0;
    if (message.moved < message.bytes) break;
    ended.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  if (moved) signal(session_.block(to).doorbell);
  return moved;
}

bool MessageQueue::pull(int from, Messages& ended) {
  Incoming& in = incoming_[static_cast<size_t>(from)];
  Channel& channel = in_[static_cast<size_t>(from)];
  bool moved = false;
  while (in.active || begin(from)) {
    std::byte* to = in.target ? in.target->data : in.early.back().bytes.data();
    const size_t n = channel.read(to + in.moved, in.header.bytes - in.moved);
    in.moved += n;
    moved = true;
    if (in.moved < in.header.bytes) {
      moved = n != 0;
      break;
    }
    in.active = false;
    if (in.target) ended.push_back(std::move(in.target));
    in.target = nullptr;
  }
  if (moved) signal(session_.block(from).doorbell);
  return moved;
}

bool MessageQueue::begin(int from) {
  Incoming& in = incoming_[static_cast<size_t>(from)];
  Channel& channel = in_[static_cast<size_t>(from)];
  if (channel.readable() < sizeof(Header)) return false;
  Header header;
  channel.peek(&header, sizeof(header));
  std::shared_ptr<Message> target = recvs_.match(from, header.tag);
  if (!target && !recvs_.expects(from)) return false;
  if (target) {
    // Out of recvs_ already: whatever check_fits() throws fails the whole group, and this message with it.
    in.target = target;
    check_fits(*target, header, from);
    target->peer = from;
  } else {
    in.early.push_back(Early{header, std::vector<std::byte>(header.bytes)});
  }
  channel.skip(sizeof(header));
  in.header = header;
  in.moved = 0;
  in.active = true;
  return true;
}

bool MessageQueue::take_early(const std::shared_ptr<Message>& recv) {
  for (int r = 0; r < session_.size(); ++r) {
    if (recv->peer != r && recv->peer != kAnySource) continue;
    Incoming& in = incoming_[static_cast<size_t>(r)];
    for (auto it = in.early.begin(); it != in.early.end(); ++it) {
      if (it->header.tag != recv->tag) continue;
      check_fits(*recv, it->header, r);
      recv->peer = r;
      const bool arriving = in.active && !in.target && std::next(it) == in.early.end();
      const size_t here = arriving ? in.moved : static_cast<size_t>(it->header.bytes);
      if (here != 0) std::memcpy(recv->data, it->bytes.data(), here);
      in.early.erase(it);
      if (arriving) {
        in.target = recv;  // the rest goes straight to it
      } else {
        delivered_.push_back(recv);
      }
      return true;
    }
  }
  return false;
}

void MessageQueue::check_fits(const Message& recv, const Header& header, int from) const {
  if (fits(recv, header)) return;
  throw MismatchError(misfit(recv, header, session_.describe(session_.rank()), session_.describe(from)));
}

Messages MessageQueue::take_all() {
  Messages all = posted();
  all.insert(all.end(), delivered_.begin(), delivered_.end());
  delivered_.clear();
  recvs_.clear();
  for (auto& sends : sends_) sends.clear();
  for (auto& in : incoming_) {
    // No message is arriving any more: another thread may still call progress(), and must not write anywhere.
    in.target = nullptr;
    in.active = false;
  }
  return all;
}

Messages MessageQueue::posted() const {
  Messages all(recvs_.begin(), recvs_.end());
  for (const auto& sends : sends_) all.insert(all.end(), sends.begin(), sends.end());
  for (const auto& in : incoming_) {
    if (in.target) all.push_back(in.target);
  }
  return all;
}

bool MessageQueue::empty() const {
  if (!recvs_.empty() || !delivered_.empty()) return false;
  for (const auto& sends : sends_) {
    if (!sends.empty()) return false;
  }
  for (const auto& in : incoming_) {
    if (in.target) return false;
  }
  return true;
}

}  // namespace ours
