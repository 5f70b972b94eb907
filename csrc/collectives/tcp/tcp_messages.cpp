#include "collectives/tcp/tcp_messages.h"

#include <algorithm>
#include <cstring>

#include "collectives/messages/posted_messages.h"
#include "common/error.h"

namespace ours {

namespace {

/// The parts of a message's header for which a frame has no field.
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

}  // namespace

std::shared_ptr<PointToPoint> make_tcp_point_to_point(const std::shared_ptr<TcpMesh>& messages,
                                                      const std::shared_ptr<TcpMesh>& calls) {
  return std::make_shared<PostedMessages>(std::make_unique<TcpMessages>(messages, calls));
}

std::shared_ptr<Inbox> TcpMessages::make_inbox(const std::shared_ptr<TcpMesh>& mesh) {
  return std::make_shared<Inbox>(mesh->rank(), mesh->size(), [mesh](int rank) { return mesh->describe(rank); });
}

TcpMessages::TcpMessages(const std::shared_ptr<TcpMesh>& mesh, const std::shared_ptr<TcpMesh>& calls)
    : TcpMessages(mesh, calls, make_inbox(mesh)) {}

TcpMessages::TcpMessages(std::shared_ptr<TcpMesh> mesh, const std::shared_ptr<TcpMesh>& calls,
                         std::shared_ptr<Inbox> inbox)
    : mesh_(std::move(mesh)),
      endpoint_(mesh_->endpoint()),
      connections_(endpoint_.connections()),
      calls_(calls),
      inbox_(std::move(inbox)),
      numbers_(static_cast<size_t>(mesh_->size()), 0),
      arrived_(static_cast<size_t>(mesh_->size()), 0) {}

// --- moving ----------------------------------------------------------------------------------------------------------

void TcpMessages::reach(const Message& message) {
  if (message.peer == kAnySource || message.peer == mesh_->rank()) return;
  TcpMesh::Lock lock = mesh_->use();
  // The receiver connects, too, and so learns when the sender is gone.
  endpoint_.reach(lock, message.peer, Deadline::after(message.limit->timeout()), [&] { return message.describe(); });
}

void TcpMessages::add(const std::shared_ptr<Message>& message) {
  const TcpMesh::Lock lock = mesh_->lock();
  if (message->op != Op::Send) return inbox_->add(message);
  if (message->peer == mesh_->rank()) {
    send_to_self(*message);
    sends_.push_back({message, 1});
    return;
  }
  sends_.push_back({message});
  const uint64_t number = ++numbers_[static_cast<size_t>(message->peer)];
  connections_.data(message->peer, 0).post_send(frame_of(*message, number), message->data, &sends_.back().done);
}

void TcpMessages::send_to_self(const Message& message) {
  const int self = mesh_->rank();
  inbox_->begin(self, message.header(), true);
  if (message.bytes != 0) std::memmove(inbox_->place(self), message.data, message.bytes);
  inbox_->complete(self);
}

bool TcpMessages::progress(Messages& ended, Mover /*mover*/) {
  const TcpMesh::Lock lock = mesh_->lock();
  bool moved = inbox_->collect(ended);
  if (mesh_->failure().failed() || mesh_->has_left()) return moved;
  moved = endpoint_.progress() || moved;
  moved = collect_sent(ended) || moved;
  // By index, since the list may grow meanwhile.
  for (size_t i = 0; i < connections_.met().size(); ++i) moved = pull(connections_.met()[i]) || moved;
  return inbox_->collect(ended) || moved;
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

bool TcpMessages::pull(int from) {
  const size_t& arrived = arrived_[static_cast<size_t>(from)];
  bool moved = false;
  while (inbox_->is_arriving(from) || begin(from)) {
    moved = true;
    if (arrived == 0) connections_.data(from, 0).advance();
    if (arrived == 0) return false;
    inbox_->complete(from);
  }
  return moved;
}

bool TcpMessages::begin(int from) {
  TcpStream& stream = connections_.data(from, 0);
  const FrameHeader* const frame = stream.early();
  if (frame == nullptr) return false;
  const MessageHeader header = header_of(*frame);
  if (frame->bytes != frame->total || header.dtype > static_cast<uint32_t>(DType::Opaque8)) {
    endpoint_.garbage(from, "a message of unknown type or length");
  }
  if (!inbox_->begin(from, header)) return false;
  size_t& arrived = arrived_[static_cast<size_t>(from)];
  arrived = 0;
  stream.post_receive(*frame, inbox_->place(from), &arrived);
  return true;
}

Messages TcpMessages::take_all() {
  const TcpMesh::Lock lock = mesh_->lock();
  // The streams must not touch the memory of messages that have ended.
  for (const int rank : connections_.met()) connections_.data(rank, 0).forget();
  Messages all = posted();
  inbox_->collect(all);
  inbox_->clear();
  sends_.clear();
  return all;
}

Messages TcpMessages::posted() const {
  Messages all = inbox_->posted();
  append_sends(all);
  return all;
}

void TcpMessages::append_sends(Messages& all) const {
  for (const Outgoing& one : sends_) all.push_back(one.message);
}

// --- waiting ---------------------------------------------------------------------------------------------------------

std::string TcpMessages::call_roll(int rank) const {
  const TcpMesh::Lock lock = mesh_->lock();
  return endpoint_.call_roll({static_cast<uint32_t>(rank)});
}

const char* TcpMessages::absence(int rank, bool sending) const {
  const char* const why = connections_.absence(rank);
  if (why == nullptr || sending || !connections_.left(rank)) return why;
  // What the peer sent before it left may still be on its way.
  const TcpStream& data = connections_.data(rank, 0);
  return data.is_open() && (!data.ended() || data.early() != nullptr) ? nullptr : why;
}

bool TcpMessages::has_news() const {
  const auto& peers = connections_.met();
  return std::any_of(sends_.begin(), sends_.end(), [](const Outgoing& one) { return one.done != 0; }) ||
         std::any_of(peers.begin(), peers.end(), [this](int rank) {
           return inbox_->is_arriving(rank) && arrived_[static_cast<size_t>(rank)] != 0;
         });
}

Absent TcpMessages::absent(const Message& message, const std::function<bool(int)>& may_send) {
  Absent absent;
  // A peer that never sent a message is heard on the connections of collectives.
  if (const auto calls = calls_.lock()) calls->look();
  const TcpMesh::Lock lock = mesh_->lock();
  if (failed() || has_news()) return absent;
  // The mesh would treat unsent messages as a failure. They do not matter until one of them is waited for.
  for (const int rank : connections_.met()) {
    TcpStream& data = connections_.data(rank, 0);
    if (connections_.left(rank) && data.has_sends() && !inbox_->is_arriving(rank)) data.forget();
    // The connections may have been closed after reach(), when nobody waited yet.
    if (message.peer == rank && !connections_.is_needed(rank) && connections_.is_known(rank)) connections_.need(rank);
    // What the inbox waits for has no receive on the stream before its header has come.
    const bool awaited = message.op != Op::Send && (message.peer == rank || message.peer == kAnySource);
    if (awaited && !connections_.left(rank)) connections_.check(rank, false, true);
  }
  for (int rank = 0; rank < size(); ++rank) {
    if (rank == mesh_->rank() || (message.peer != rank && message.peer != kAnySource) || !may_send(rank)) continue;
    const char* const why = absence(rank, message.op == Op::Send);
    if (why == nullptr) continue;
    absent.last = mesh_->describe(rank) + ' ' + why + connections_.reason(rank);
    if (!connections_.left(rank)) throw PeerError(absent.last);
    ++absent.ranks;
  }
  return absent;
}

void TcpMessages::check_can_complete(const Message& message) {
  absent(message, [](int) { return true; }).check(message, size());
  check_connections();
}

void TcpMessages::check_connections() {
  const TcpMesh::Lock lock = mesh_->lock();
  if (!failed()) endpoint_.check();
}

bool TcpMessages::has_heard() {
  TcpMesh::Lock lock = mesh_->lock();
  endpoint_.sleep(lock, Clock::duration::zero());
  return failed() || connections_.anything_ready();
}

void TcpMessages::ring() {
  signal(bell_);
  mesh_->wake();
}

bool TcpMessages::rest(const std::function<bool()>& ready) {
  const TcpMesh::Waiting waiting(*mesh_);
  if (watched_.exchange(true)) {
    // One thread watches the connections; it rings when it has seen something.
    bool time_to_look = false;
    wait_on(
        bell_, tcp_wait_policy(), Deadline::after(kLookAround),
        [&] { return time_to_look || ready() || !watched_.load(); }, [&] { time_to_look = true; });
    return time_to_look;
  }
  bool time_to_look = true;
  try {
    time_to_look = watch_connections(ready);
  } catch (...) {
    fail(std::current_exception());
  }
  watched_.store(false);
  signal(bell_);
  return time_to_look;
}

bool TcpMessages::watch_connections(const std::function<bool()>& ready) {
  // ready() may take the lock under which other threads wait for the mesh's.
  for (Awake awake(tcp_wait_policy());;) {
    const uint32_t before = heard();
    if (ready()) return false;
    if (has_heard()) return false;
    if (awake.moment([] { return false; })) continue;
    TcpMesh::Lock lock = mesh_->lock();
    // A thread that rings or fails from here on writes to the word that the sleep watches.
    if (heard() != before || failed()) return false;
    const auto began = Clock::now();
    endpoint_.sleep(lock, kLookAround);
    return Clock::now() - began >= kLookAround;
  }
}

}  // namespace ours
