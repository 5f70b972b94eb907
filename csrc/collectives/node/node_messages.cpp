#include "collectives/node/node_messages.h"

#include <algorithm>
#include <utility>

#include "collectives/messages/posted_messages.h"
#include "common/error.h"
#include "common/process_memory.h"

namespace ours {

std::shared_ptr<PointToPoint> make_node_point_to_point(const std::shared_ptr<NodeSession>& session,
                                                       Setting write_around) {
  return std::make_shared<PostedMessages>(std::make_unique<NodeMessages>(session, write_around));
}

NodeMessages::NodeMessages(const std::shared_ptr<NodeSession>& session, Setting write_around)
    : NodeMessages(session,
                   std::make_shared<Inbox>(session->rank(), session->size(),
                                           [session](int rank) { return session->describe(rank); }),
                   write_around) {}

NodeMessages::NodeMessages(std::shared_ptr<NodeSession> session, std::shared_ptr<Inbox> inbox, Setting write_around)
    : session_(std::move(session)), write_around_(write_around), spread_(*session_), inbox_(std::move(inbox)) {
  for (int r = 0; r < size(); ++r) {
    const auto number = static_cast<size_t>(session_->number_of(r));
    locals_.resize(std::max(locals_.size(), number + 1), -1);
    locals_[number] = r;
    out_.push_back({Channel(*session_, session_->rank(), r)});
    in_.push_back({Channel(*session_, r, session_->rank())});
  }
}

void NodeMessages::add(const std::shared_ptr<Message>& message) {
  if (message->op != Op::Send) return inbox_->add(message);
  const auto to = static_cast<size_t>(local_of(message->peer));
  Outgoing& out = out_[to];
  if (!out.reserved) {
    const NodeLayout& layout = session_->layout();
    session_->memory()->reserve(layout.channel(static_cast<size_t>(session_->rank()), to), layout.channel_stride());
    out.reserved = true;
  }
  out.sends.push_back(message);
}

bool NodeMessages::progress(Messages& ended, Mover mover) {
  bool moved = false;
  for (int r = 0; r < size(); ++r) {
    moved = push(r, mover, ended) || moved;
    moved = pull(r) || moved;
  }
  return inbox_->collect(ended) || moved;
}

bool NodeMessages::push(int to, Mover mover, Messages& ended) {
  Outgoing& out = out_[static_cast<size_t>(to)];
  bool moved = false;
  while (!out.sends.empty()) {
    Message& message = *out.sends.front();
    if (!message.header_sent) {
      if (out.channel.writable() < sizeof(Header) || !choose_way(to, mover)) break;
      const Header header{message.header(), out.lends ? reinterpret_cast<uint64_t>(message.data) : 0};
      out.channel.write(&header, sizeof(header));
      message.header_sent = true;
      moved = true;
    }
    const size_t n = push_part(to, message);
    message.moved += n;
    moved = moved || n != 0;
    if (message.moved < message.bytes || !has_ended(out)) break;
    end_trial(out, message.bytes);
    ended.push_back(std::move(out.sends.front()));
    out.sends.pop_front();
  }
  if (moved) signal(session_->block(to).doorbell);
  return moved;
}

bool NodeMessages::choose_way(int to, Mover mover) {
  Outgoing& out = out_[static_cast<size_t>(to)];
  const Message& message = *out.sends.front();
  if (message.bytes + sizeof(Header) <= out.channel.capacity()) return true;
  const bool can_copy = mover != Mover::Other && may_copy();
  if (can_copy && mover == Mover::Goes) {
    ring();  // for a thread that moves messages already; otherwise this one may come to wait
    return false;
  }
  const bool could_lend = session_->reads_all(to);
  const bool is_to_lend = could_lend && (!can_copy || faster_way(message.bytes).next());
  // This asks the system, which takes microseconds, so only what is to be lent is asked for.
  out.lends = is_to_lend && is_readable_by_others(message.data, message.bytes);
  if (could_lend && can_copy && out.lends == is_to_lend) {
    out.trial = Trial{out.lends, out.channel.written() + sizeof(Header)};
  }
  return true;
}

void NodeMessages::begin_trial(Outgoing& out) {
  if (!out.trial || out.trial->began || out.channel.read_so_far() < out.trial->header_end) return;
  out.trial->began = Clock::now();
}

void NodeMessages::end_trial(Outgoing& out, size_t bytes) {
  // If the receiver came and was done between two looks, there is nothing to count.
  if (out.trial && out.trial->began) {
    faster_way(bytes).took(out.trial->lends, Clock::now() - *out.trial->began, bytes);
  }
  out.trial.reset();
}

FasterWay& NodeMessages::faster_way(size_t bytes) {
  return ways_[size_class(bytes, session_->layout().ring_bytes, ways_.size())];
}

size_t NodeMessages::push_part(int to, Message& message) {
  Outgoing& out = out_[static_cast<size_t>(to)];
  if (!out.lends) {
    return in_parts(to, message.bytes - message.moved, [&](size_t at, size_t n) {
      begin_trial(out);
      return write(out, message.data + message.moved + at, n);
    });
  }
  if (out.channel.taken() == out.taken) {
    begin_trial(out);
    return 0;
  }
  ++out.taken;
  out.lends = false;
  return message.bytes;
}

size_t NodeMessages::write(Outgoing& out, const std::byte* data, size_t bytes) const {
  bytes = std::min(bytes, out.channel.writable());  // what is timed has to be what is written
  out.times.time(write_around_, out.times.around_is_faster(), bytes,
                 [&](bool around) { bytes = out.channel.write(data, bytes, around); });
  return bytes;
}

template <class Copy>
size_t NodeMessages::in_parts(int peer, size_t bytes, Copy&& copy) {
  const size_t ring = session_->layout().ring_bytes;
  const size_t part = session_->have_own_cores() ? WriteTimes::kTimedBytes : ring;
  size_t moved = 0;
  while (moved < bytes && moved < ring) {
    if (moved != 0) signal(session_->block(peer).doorbell);
    const size_t n = copy(moved, std::min(part, bytes - moved));
    if (n == 0) break;
    moved += n;
  }
  return moved;
}

bool NodeMessages::pull(int from) {
  Incoming& in = in_[static_cast<size_t>(from)];
  const int number = session_->number_of(from);
  bool moved = false;
  while (true) {
    if (!inbox_->is_arriving(number)) {
      if (!begin(from)) break;
      moved = true;
      // A sender that times a message it lends has to see when this rank comes for it. Others sleep on.
      if (in.address != 0 && session_->have_own_cores()) signal(session_->block(from).doorbell);
    }
    const size_t n = pull_part(from);
    in.moved += n;
    moved = moved || n != 0;
    if (in.moved < in.bytes) break;
    inbox_->complete(number);
  }
  if (moved) signal(session_->block(from).doorbell);
  return moved;
}

size_t NodeMessages::pull_part(int from) {
  Incoming& in = in_[static_cast<size_t>(from)];
  std::byte* const to = inbox_->place(session_->number_of(from)) + in.moved;
  if (in.address == 0) {
    return in_parts(from, in.bytes - in.moved, [&](size_t at, size_t n) { return in.channel.read(to + at, n); });
  }
  constexpr size_t kAtOnce = size_t{1} << 20;  // other messages move in between
  const auto what = [&] { return "a message of " + std::to_string(in.bytes) + " bytes from it"; };
  const size_t n = std::min(kAtOnce, in.bytes - in.moved);
  session_->read(from, to, in.address + in.moved, n, what);
  if (in.moved + n < in.bytes || in.channel.take()) return n;
  session_->failure().check();
  throw PeerError(session_->describe(from) + " closed the group during " + what());
}

bool NodeMessages::begin(int from) {
  Incoming& in = in_[static_cast<size_t>(from)];
  Header header;
  if (in.channel.readable() < sizeof(header)) return false;
  in.channel.peek(&header, sizeof(header));
  if (!inbox_->begin(session_->number_of(from), header.message)) return false;
  in.channel.skip(sizeof(header));
  in.bytes = header.message.bytes;
  in.moved = 0;
  in.address = header.address;
  return true;
}

Messages NodeMessages::take_all() {
  Messages all = posted();
  inbox_->collect(all);
  inbox_->clear();
  for (Outgoing& out : out_) {
    if (out.lends) out.channel.withdraw();
    out.trial.reset();
    out.sends.clear();
  }
  return all;
}

Messages NodeMessages::posted() const {
  Messages all = inbox_->posted();
  append_sends(all);
  return all;
}

void NodeMessages::append_sends(Messages& all) const {
  for (const Outgoing& out : out_) all.insert(all.end(), out.sends.begin(), out.sends.end());
}

bool NodeMessages::empty() const {
  return inbox_->empty() &&
         std::all_of(out_.begin(), out_.end(), [](const Outgoing& out) { return out.sends.empty(); });
}

bool NodeMessages::rest(const std::function<bool()>& ready) {
  bool time_to_look = false;
  spread_.publish(CoreSpread::kMessages);
  // One of several threads is enough.
  if (std::unique_lock<std::mutex> lock(spread_mutex_, std::try_to_lock);
      lock && spread_.settle(CoreSpread::kMessages)) {
    spread_.publish(CoreSpread::kMessages);
  }
  wait_on(
      doorbell(), session_->wait_policy(), Deadline::after(kLookAround), [&] { return time_to_look || ready(); },
      [&] { time_to_look = true; });
  spread_.withdraw(CoreSpread::kMessages);
  return time_to_look;
}

bool NodeMessages::is_delivered(int to, const Message& message) const {
  const Outgoing& out = out_[static_cast<size_t>(to)];
  if (!message.header_sent) return false;  // only that of the first one is
  return out.lends ? out.channel.taken() != out.taken : message.moved == message.bytes && has_ended(out);
}

Absent NodeMessages::absent(const Message& message) const {
  Absent absent;
  for (int r = 0; r < size(); ++r) {
    if (r == session_->rank() || (message.peer != session_->number_of(r) && message.peer != kAnySource)) continue;
    const char* const why = session_->absence(r);
    if (why == nullptr) continue;
    // What the peer sent before it ended may still be on its way to us, and it may have received this.
    if (message.op == Op::Send ? is_delivered(r, message) : in_[static_cast<size_t>(r)].channel.readable() != 0) {
      continue;
    }
    absent.last = session_->describe(r) + ' ' + why + session_->reason(r);
    if (session_->block(r).state.load() != kLeft) throw PeerError(absent.last);
    ++absent.ranks;
  }
  return absent;
}

}  // namespace ours
