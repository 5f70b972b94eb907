#include "collectives/messages/message_queue.h"

#include <utility>

namespace ours {

MessageQueue::MessageQueue(NodeSession& session)
    : session_(session),
      inbox_(session.rank(), session.size(), [&session](int rank) { return session.describe(rank); }) {
  for (int r = 0; r < session.size(); ++r) {
    out_.push_back({Channel(session, session.rank(), r)});
    in_.push_back({Channel(session, r, session.rank())});
  }
}

void MessageQueue::add(std::shared_ptr<Message> message) {
  if (message->op != Op::Send) return inbox_.add(std::move(message));
  const auto to = static_cast<size_t>(message->peer);
  Outgoing& out = out_[to];
  if (!out.reserved) {
    const NodeLayout& layout = session_.layout();
    session_.memory()->reserve(layout.channel(static_cast<size_t>(session_.rank()), to), layout.channel_stride());
    out.reserved = true;
  }
  out.sends.push_back(std::move(message));
}

bool MessageQueue::progress(Messages& ended) {
  bool moved = false;
  for (int r = 0; r < session_.size(); ++r) {
    moved = push(r, ended) || moved;
    moved = pull(r) || moved;
  }
  return inbox_.collect(ended) || moved;
}

bool MessageQueue::push(int to, Messages& ended) {
  auto& [channel, reserved, sends] = out_[static_cast<size_t>(to)];
  bool moved = false;
  while (!sends.empty()) {
    Message& message = *sends.front();
    if (!message.header_sent) {
      const MessageHeader header = message.header();
      if (channel.writable() < sizeof(header)) break;
      channel.write(&header, sizeof(header));
      message.header_sent = true;
      moved = true;
    }
    const size_t n = channel.write(message.data + message.moved, message.bytes - message.moved);
    message.moved += n;
    moved = moved || n != 0;
    if (message.moved < message.bytes) break;
    ended.push_back(std::move(sends.front()));
    sends.pop_front();
  }
  if (moved) signal(session_.block(to).doorbell);
  return moved;
}

bool MessageQueue::pull(int from) {
  Incoming& in = in_[static_cast<size_t>(from)];
  bool moved = false;
  while (inbox_.is_arriving(from) || begin(from)) {
    const size_t n = in.channel.read(inbox_.place(from) + in.moved, in.bytes - in.moved);
    in.moved += n;
    moved = true;
    if (in.moved < in.bytes) {
      moved = n != 0;
      break;
    }
    inbox_.complete(from);
  }
  if (moved) signal(session_.block(from).doorbell);
  return moved;
}

bool MessageQueue::begin(int from) {
  Incoming& in = in_[static_cast<size_t>(from)];
  MessageHeader header;
  if (in.channel.readable() < sizeof(header)) return false;
  in.channel.peek(&header, sizeof(header));
  if (!inbox_.begin(from, header)) return false;
  in.channel.skip(sizeof(header));
  in.bytes = header.bytes;
  in.moved = 0;
  return true;
}

Messages MessageQueue::take_all() {
  Messages all = inbox_.take_all();
  for (Outgoing& out : out_) {
    all.insert(all.end(), out.sends.begin(), out.sends.end());
    out.sends.clear();
  }
  return all;
}

Messages MessageQueue::posted() const {
  Messages all;
  inbox_.append_posted(all);
  for (const Outgoing& out : out_) all.insert(all.end(), out.sends.begin(), out.sends.end());
  return all;
}

bool MessageQueue::empty() const {
  for (const Outgoing& out : out_) {
    if (!out.sends.empty()) return false;
  }
  return inbox_.empty();
}

}  // namespace ours
