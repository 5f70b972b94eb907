#include "collectives/tcp/tcp_messages.h"

#include <algorithm>
#include <cstring>

#include "collectives/messages/posted_messages.h"
#include "common/error.h"

namespace ours {

namespace {

/// What a frame tells of its message, beside the length.
struct Label {
  int32_t tag;
  uint32_t dtype;
};

FrameHeader frame_of(const Message& message, uint64_t number) {
  FrameHeader frame;
  frame.call = number;
  frame.total = frame.bytes = message.bytes;
  const Label label{message.tag, static_cast<uint32_t>(message.dtype)};
  std::memcpy(frame.signature.data(), &label, sizeof(label));
  return frame;
}

MessageHeader header_of(const FrameHeader& frame) {
  Label label;
  std::memcpy(&label, frame.signature.data(), sizeof(label));
  return {frame.bytes, label.tag, label.dtype};
}

MessageHeader header_of(const Message& message) {
  return {message.bytes, message.tag, static_cast<uint32_t>(message.dtype)};
}

}  // namespace

std::shared_ptr<PointToPoint> make_tcp_point_to_point(std::shared_ptr<TcpMesh> messages,
                                                      const std::shared_ptr<TcpMesh>& calls) {
  return std::make_shared<PostedMessages>(std::make_unique<TcpMessages>(std::move(messages), calls));
}

TcpMessages::TcpMessages(std::shared_ptr<TcpMesh> mesh, const std::shared_ptr<TcpMesh>& calls)
    : mesh_(std::move(mesh)),
      calls_(calls),
      numbers_(static_cast<size_t>(mesh_->size()), 0),
      incoming_(static_cast<size_t>(mesh_->size())) {}

void TcpMessages::reach(const Message& message) {
  if (message.peer == kAnySource || message.peer == mesh_->rank()) return;
  TcpMesh::Lock lock(mesh_->mutex_);
  // A receiver connects, too: so it learns that the other one is gone.
  mesh_->need(message.peer, lock, Deadline::after(message.limit->timeout()), [&] { return message.describe(); });
}

void TcpMessages::add(const std::shared_ptr<Message>& message) {
  const TcpMesh::Lock lock(mesh_->mutex_);
  if (message->peer == mesh_->rank() && message->op == Op::Send) return send_to_self(message);
  if (message->op != Op::Send) {
    if (!take_early(message)) receives_.add(message);
    return;
  }
  sends_.push_back({message});
  const uint64_t number = ++numbers_[static_cast<size_t>(message->peer)];
  mesh_->slot(message->peer, kData).stream.post_send(frame_of(*message, number), message->data, &sends_.back().done);
}

void TcpMessages::send_to_self(const std::shared_ptr<Message>& message) {
  const MessageHeader header = header_of(*message);
  Incoming& in = incoming_[static_cast<size_t>(mesh_->rank())];
  Early early{header, std::vector<std::byte>(message->bytes), true, nullptr};
  if (message->bytes != 0) std::memcpy(early.bytes.data(), message->data, message->bytes);
  in.target = receives_.match(mesh_->rank(), message->tag);
  if (in.target) {
    check_fits(*in.target, header, mesh_->rank());
    in.target->peer = mesh_->rank();
    deliver(early, in.target);
    delivered_.push_back(std::move(in.target));
    in.target = nullptr;
  } else {
    in.early.push_back(std::move(early));
  }
  delivered_.push_back(message);
}

bool TcpMessages::progress(Messages& ended) {
  const TcpMesh::Lock lock(mesh_->mutex_);
  bool moved = !delivered_.empty();
  ended.insert(ended.end(), delivered_.begin(), delivered_.end());
  delivered_.clear();
  if (mesh_->failure_.failed() || mesh_->left_.load()) return moved;
  moved = mesh_->progress() || moved;
  moved = collect_sent(ended) || moved;
  for (size_t i = 0; i < mesh_->met_.size(); ++i) moved = pull(mesh_->met_[i], ended) || moved;
  return moved;
}

bool TcpMessages::collect_sent(Messages& ended) {
  bool moved = false;
  for (auto one = sends_.begin(); one != sends_.end();) {
    if (one->done == 0) {
      ++one;
      continue;
    }
    ended.push_back(std::move(one->message));
    one = sends_.erase(one);
    moved = true;
  }
  return moved;
}

bool TcpMessages::pull(int from, Messages& ended) {
  Incoming& in = incoming_[static_cast<size_t>(from)];
  TcpStream& stream = mesh_->slot(from, kData).stream;
  bool moved = false;
  while (in.active || begin(from)) {
    moved = true;
    if (in.done == 0) stream.advance();
    if (in.done == 0) break;
    complete(in, ended);
  }
  return moved && !in.active;
}

bool TcpMessages::begin(int from) {
  Incoming& in = incoming_[static_cast<size_t>(from)];
  TcpStream& stream = mesh_->slot(from, kData).stream;
  const FrameHeader* const frame = stream.early();
  if (frame == nullptr) return false;
  const MessageHeader header = header_of(*frame);
  if (frame->bytes != frame->total || header.dtype > static_cast<uint32_t>(DType::Opaque8)) {
    mesh_->garbage(from, "a message of unknown type or length");
  }
  std::shared_ptr<Message> target = receives_.match(from, header.tag);
  if (!target && !receives_.expects(from)) return false;
  if (target) {
    // Out of receives_ already: whatever check_fits() throws fails the whole group, and this message with it.
    in.target = target;
    check_fits(*target, header, from);
    target->peer = from;
  } else {
    in.early.push_back({header, std::vector<std::byte>(header.bytes), false, nullptr});
  }
  in.done = 0;
  in.active = true;
  stream.post_receive(*frame, in.target ? in.target->data : in.early.back().bytes.data(), &in.done);
  return true;
}

void TcpMessages::complete(Incoming& in, Messages& ended) {
  in.active = false;
  if (in.target) {
    ended.push_back(std::move(in.target));
    in.target = nullptr;
    return;
  }
  Early& early = in.early.back();
  early.complete = true;
  if (!early.target) return;
  deliver(early, early.target);
  ended.push_back(std::move(early.target));
  in.early.pop_back();
}

bool TcpMessages::take_early(const std::shared_ptr<Message>& receive) {
  for (int rank = 0; rank < size(); ++rank) {
    if (receive->peer != rank && receive->peer != kAnySource) continue;
    Incoming& in = incoming_[static_cast<size_t>(rank)];
    for (auto it = in.early.begin(); it != in.early.end(); ++it) {
      if (it->header.tag != receive->tag || it->target) continue;
      check_fits(*receive, it->header, rank);
      receive->peer = rank;
      if (!it->complete) {
        it->target = receive;
        return true;
      }
      deliver(*it, receive);
      delivered_.push_back(receive);
      in.early.erase(it);
      return true;
    }
  }
  return false;
}

void TcpMessages::deliver(const Early& early, const std::shared_ptr<Message>& receive) {
  if (!early.bytes.empty()) std::memcpy(receive->data, early.bytes.data(), early.bytes.size());
}

void TcpMessages::check_fits(const Message& receive, const MessageHeader& header, int from) {
  if (fits(receive, header)) return;
  throw MismatchError(misfit(receive, header, mesh_->describe_self(), mesh_->describe(from)));
}

Messages TcpMessages::take_all() {
  const TcpMesh::Lock lock(mesh_->mutex_);
  Messages all = posted();
  all.insert(all.end(), delivered_.begin(), delivered_.end());
  delivered_.clear();
  // The streams must not touch the memory of messages that have ended.
  for (const int rank : mesh_->met_) mesh_->slot(rank, kData).stream.forget();
  sends_.clear();
  receives_.clear();
  for (Incoming& in : incoming_) in = Incoming();
  return all;
}

Messages TcpMessages::posted() const {
  Messages all(receives_.begin(), receives_.end());
  for (const Outgoing& one : sends_) all.push_back(one.message);
  for (const Incoming& in : incoming_) {
    if (in.target) all.push_back(in.target);
    for (const Early& early : in.early) {
      if (early.target) all.push_back(early.target);
    }
  }
  return all;
}

bool TcpMessages::empty() const {
  const auto waits = [](const Incoming& in) {
    return in.target || std::any_of(in.early.begin(), in.early.end(), [](const Early& one) { return one.target; });
  };
  return receives_.empty() && sends_.empty() && delivered_.empty() &&
         std::none_of(incoming_.begin(), incoming_.end(), waits);
}

}  // namespace ours
