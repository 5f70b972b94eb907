#include "transport/tcp/tcp_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

namespace ours {

namespace {

/// After this many bytes, a stream gives the others a turn.
constexpr size_t kTurnBytes = 1024 * 1024;
constexpr size_t kMostPieces = 16;

}  // namespace

void TcpStream::finish() {
  if (!is_open()) return;
  ::shutdown(fd(), SHUT_WR);
  // A connection that is closed with something unread is reset, and what was sent would be lost.
  constexpr size_t kMostReads = 64;
  std::byte rest[4096];
  for (size_t i = 0; i < kMostReads && ::recv(fd(), rest, sizeof(rest), 0) > 0; ++i) {
  }
  ended_ = true;
  fd_.reset();
}

void TcpStream::send_now() {
  if (is_open() && !ended_) write();
}

void TcpStream::release() {
  held_ = false;
  sends_.insert(sends_.end(), std::make_move_iterator(kept_back_.begin()), std::make_move_iterator(kept_back_.end()));
  kept_back_.clear();
}

void TcpStream::end_sending() { ::shutdown(fd(), SHUT_WR); }

void TcpStream::part() {
  fd_.reset();
  readable_ = writable_ = ended_ = in_payload_ = false;
  error_ = 0;
  std::vector<std::byte>().swap(buffer_);
  buffer_begin_ = buffer_end_ = 0;
  sent_ = taken_ = 0;
  release();
}

void TcpStream::post_send(const FrameHeader& header, const void* payload, size_t* done) {
  post({header, static_cast<const std::byte*>(payload), {}, done, 0});
}

void TcpStream::post_send(const FrameHeader& header, std::string payload) {
  Send send{header, nullptr, std::move(payload), nullptr, 0};
  send.header.bytes = send.own.size();
  post(std::move(send));
}

void TcpStream::post_receive(const FrameHeader& header, void* to, size_t* done) {
  receives_.push_back({header, static_cast<std::byte*>(to), done});
}

void TcpStream::forget() {
  if (data_) {
    sends_.clear();
    kept_back_.clear();
  }
  receives_.clear();
}

bool TcpStream::can_take() const {
  if (!in_payload_) return buffered() >= sizeof(FrameHeader);
  return (!data_ || has_receives()) && (buffered() > 0 || received_ == following_bytes(header_));
}

bool TcpStream::ready() const {
  if (!is_open()) return false;
  const bool wants_bytes = !in_payload_ || !data_ || has_receives();
  return (writable_ && !sends_.empty() && !ended_) || (readable_ && wants_bytes && !ended_) || can_take();
}

bool TcpStream::advance() {
  if (!is_open()) return false;
  const bool wrote = write();
  return read() || wrote;
}

bool TcpStream::write() {
  size_t moved = 0;
  while (writable_ && !sends_.empty() && moved < kTurnBytes && error_ == 0) {
    iovec pieces[kMostPieces];
    size_t count = 0;
    size_t offered = 0;
    for (Send& send : sends_) {
      if (count + 2 > kMostPieces || offered >= kTurnBytes) break;
      auto* header = reinterpret_cast<std::byte*>(&send.header);
      const size_t of_header = std::min(send.sent, sizeof(FrameHeader));
      const size_t of_payload = send.sent - of_header;
      if (of_header < sizeof(FrameHeader)) pieces[count++] = {header + of_header, sizeof(FrameHeader) - of_header};
      const auto* payload = send.own.empty() ? send.payload : reinterpret_cast<const std::byte*>(send.own.data());
      const size_t following = following_bytes(send.header);
      if (of_payload < following) {
        pieces[count++] = {const_cast<std::byte*>(payload) + of_payload, following - of_payload};
      }
      offered += sizeof(FrameHeader) + following - send.sent;
    }
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    // Without this flag, a peer's death would raise a signal.
    const ssize_t sent = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
    if (sent < 0) {
      if (errno == EINTR) continue;
      writable_ = false;
      if (errno != EAGAIN) {
        // What the peer sent before it closed has still to be read.
        error_ = errno;
        readable_ = true;
      }
      break;
    }
    moved += static_cast<size_t>(sent);
    for (auto left = static_cast<size_t>(sent); left > 0 || !sends_.empty();) {
      Send& send = sends_.front();
      const size_t rest = sizeof(FrameHeader) + following_bytes(send.header) - send.sent;
      if (left < rest) {
        send.sent += left;
        break;
      }
      left -= rest;
      if (send.done != nullptr) ++*send.done;
      sends_.pop_front();
      ++sent_;
      if (left == 0) break;
    }
  }
  return moved > 0;
}

bool TcpStream::read() {
  size_t turns = 0;
  bool moved = false;
  // Every step takes some of what is there, or fills the buffer because it needs more.
  while (!ended_ || buffered() > 0) {
    const bool took = in_payload_ ? (data_ ? take_payload() : take_control()) : take_header();
    if (took) {
      moved = true;
      if (++turns * kBufferBytes >= kTurnBytes) break;
      continue;
    }
    const bool blocked = in_payload_ && data_ && receives_.empty();
    if (blocked || !readable_ || ended_ || !fill()) break;
    moved = true;
  }
  return moved;
}

size_t TcpStream::room_after(size_t receives) const {
  const bool is_long = receives_.size() > receives && following_bytes(receives_[receives].header) >= kBufferBytes;
  return is_long ? sizeof(FrameHeader) : kBufferBytes;
}

bool TcpStream::fill() {
  if (buffer_.empty()) buffer_.resize(kBufferBytes);
  if (buffer_begin_ > 0) {
    std::memmove(buffer_.data(), buffer_.data() + buffer_begin_, buffered());
    buffer_end_ -= buffer_begin_;
    buffer_begin_ = 0;
  }
  const size_t most = room_after(0);
  while (true) {
    const ssize_t got = ::recv(fd(), buffer_.data() + buffer_end_, most - buffer_end_, 0);
    if (got > 0) {
      buffer_end_ += static_cast<size_t>(got);
      return true;
    }
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) {
      readable_ = false;
    } else {
      broke(got == 0 ? 0 : errno);
    }
    return false;
  }
}

bool TcpStream::take_header() {
  if (buffered() < sizeof(FrameHeader)) return false;
  std::memcpy(&header_, buffer_.data() + buffer_begin_, sizeof(FrameHeader));
  buffer_begin_ += sizeof(FrameHeader);
  if (const char* fault = fault_of(header_, data_)) {
    handler_.garbage(peer_, fault);
    return false;
  }
  in_payload_ = true;
  received_ = 0;
  control_.clear();
  if (data_) handler_.check_data(peer_, header_);
  return true;
}

bool TcpStream::take_payload() {
  if (receives_.empty()) return false;
  Receive& receive = receives_.front();
  if (received_ == 0) check_expected(receive.header);
  if (header_.engine_number != 0) {
    const Receive announced = receive;
    receives_.pop_front();
    in_payload_ = false;
    ++taken_;
    handler_.receive_by_engine(peer_, header_, announced.to, announced.done);
    return true;
  }
  const size_t wanted = header_.bytes - received_;
  const size_t had = std::min(wanted, buffered());
  if (had > 0) {
    std::memcpy(receive.to + received_, buffer_.data() + buffer_begin_, had);
    buffer_begin_ += had;
    received_ += had;
  }
  if (received_ == header_.bytes) {
    ++*receive.done;
    receives_.pop_front();
    in_payload_ = false;
    ++taken_;
    return true;
  }
  // Much more is to come: the payload goes straight to its place, and what follows it into the buffer.
  if (had > 0 || !readable_ || ended_) return had > 0;
  if (buffer_.empty()) buffer_.resize(kBufferBytes);
  buffer_begin_ = buffer_end_ = 0;
  iovec pieces[2] = {{receive.to + received_, header_.bytes - received_}, {buffer_.data(), room_after(1)}};
  msghdr message{};
  message.msg_iov = pieces;
  message.msg_iovlen = 2;
  const ssize_t got = ::recvmsg(fd(), &message, 0);
  if (got > 0) {
    const size_t direct = std::min(static_cast<size_t>(got), pieces[0].iov_len);
    received_ += direct;
    buffer_end_ = static_cast<size_t>(got) - direct;
    return true;
  }
  if (got < 0 && errno == EAGAIN) {
    readable_ = false;
  } else if (got == 0 || errno != EINTR) {
    broke(got == 0 ? 0 : errno);
  }
  return false;
}

bool TcpStream::take_control() {
  // fault_of() has limited the length.
  const size_t had = std::min(header_.bytes - control_.size(), buffered());
  control_.append(reinterpret_cast<const char*>(buffer_.data() + buffer_begin_), had);
  buffer_begin_ += had;
  if (control_.size() < header_.bytes) return had > 0;
  in_payload_ = false;
  handler_.hear(peer_, header_, control_);
  return true;
}

void TcpStream::broke(int error) {
  ended_ = true;
  if (error_ == 0) error_ = error;
  readable_ = writable_ = false;
}

void TcpStream::check_expected(const FrameHeader& expected) const {
  const bool same = header_.call == expected.call && header_.phase == expected.phase && header_.part == expected.part &&
                    header_.total == expected.total && header_.bytes == expected.bytes;
  if ((header_.engine_number != 0) != (expected.engine_number != 0)) {
    handler_.garbage(peer_, header_.engine_number != 0 ? "data comes by an engine that this rank does not use"
                                                       : "data that should come by the engine between nodes does not");
  }
  if (!same) handler_.garbage(peer_, "a part of a message is not the one that follows");
}

}  // namespace ours
