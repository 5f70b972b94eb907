#include "transport/tcp/tcp_handshake.h"

#include <sys/random.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "transport/tcp/tcp_socket.h"

namespace ours {

Nonce draw_nonce() {
  Nonce nonce;
  if (::getrandom(nonce.data(), nonce.size(), 0) != static_cast<ssize_t>(nonce.size())) {
    throw SystemError("cannot draw a random number (getrandom)", errno);
  }
  return nonce;
}

TcpHandshake::TcpHandshake(ProcessFd fd, const TcpSelf& self)
    : fd_(std::move(fd)), self_(self), accepting_(true), step_(Step::Send) {
  Challenge challenge;
  challenge.nonce = challenge_ = draw_nonce();
  say(&challenge, sizeof(challenge), Step::Receive);
  hear(sizeof(Hello));
}

TcpHandshake::TcpHandshake(ProcessFd fd, const TcpSelf& self, int to, int stream)
    : fd_(std::move(fd)), self_(self), accepting_(false), step_(Step::Connect), peer_(to), stream_(stream) {
  hear(sizeof(Challenge));
}

TcpHandshake::State TcpHandshake::state() const {
  return step_ == Step::Done ? State::Done : step_ == Step::Broken ? State::Broken : State::Going;
}

TcpHandshake::State TcpHandshake::advance() {
  for (Step before = Step::Broken; before != step_;) {
    before = step_;
    if (step_ == Step::Connect) finish_connecting();
    if (step_ == Step::Send) write();
    if (step_ == Step::Receive) read();
  }
  return state();
}

void TcpHandshake::finish_connecting() {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  if (::getpeername(fd_.get(), reinterpret_cast<sockaddr*>(&peer), &length) == 0) {
    step_ = Step::Receive;
    return;
  }
  int error = 0;
  length = sizeof(error);
  ::getsockopt(fd_.get(), SOL_SOCKET, SO_ERROR, &error, &length);
  refused_ = error == ECONNREFUSED;
  if (error != 0) broken(text_of_error(error));
}

void TcpHandshake::write() {
  const ssize_t sent = ::send(fd_.get(), out_.data(), out_.size(), MSG_NOSIGNAL);
  if (sent < 0) {
    if (errno != EAGAIN && errno != EINTR) broken(text_of_error(errno));
    return;
  }
  out_.erase(0, static_cast<size_t>(sent));
  if (out_.empty()) step_ = after_;
}

void TcpHandshake::read() {
  char buffer[sizeof(Hello)];
  // Reads not a byte more than the message, because what follows is for the stream.
  const ssize_t got = ::recv(fd_.get(), buffer, expected_ - in_.size(), 0);
  if (got < 0) {
    if (errno != EAGAIN && errno != EINTR) broken(text_of_error(errno));
    return;
  }
  if (got == 0) {
    broken("it closed the connection during the handshake");
    return;
  }
  in_.append(buffer, static_cast<size_t>(got));
  if (in_.size() == expected_) received();
}

void TcpHandshake::received() {
  if (accepting_) {
    Hello hello;
    std::memcpy(&hello, in_.data(), sizeof(hello));
    if (!is_sound(hello, self_.secret, challenge_, self_.rank, self_.size, self_.streams)) {
      broken("a stranger, or a rank of another group");
      return;
    }
    peer_ = static_cast<int>(hello.from);
    stream_ = static_cast<int>(hello.stream);
    hello_ = hello.nonce;
    step_ = Step::Judge;
    return;
  }
  if (expected_ == sizeof(Challenge)) {
    Challenge challenge;
    std::memcpy(&challenge, in_.data(), sizeof(challenge));
    if (!is_sound(challenge)) {
      broken("another program, or another version of this package, answers there");
      return;
    }
    challenge_ = challenge.nonce;
    Hello hello;
    hello.from = static_cast<uint32_t>(self_.rank);
    hello.to = static_cast<uint32_t>(peer_);
    hello.stream = static_cast<uint32_t>(stream_);
    hello.nonce = hello_ = draw_nonce();
    hello.proof = proof_of(self_.secret, challenge_, hello);
    say(&hello, sizeof(hello), Step::Receive);
    hear(sizeof(Welcome));
    return;
  }
  Welcome welcome;
  std::memcpy(&welcome, in_.data(), sizeof(welcome));
  if (!is_sound(welcome, self_.secret, challenge_, hello_)) {
    broken("a rank of another group answers there");
    return;
  }
  step_ = Step::Done;
}

void TcpHandshake::accept() {
  Welcome welcome;
  welcome.proof = proof_of(self_.secret, challenge_, hello_, welcome);
  say(&welcome, sizeof(welcome), Step::Done);
}

void TcpHandshake::say(const void* message, size_t bytes, Step after) {
  out_.assign(static_cast<const char*>(message), bytes);
  step_ = Step::Send;
  after_ = after;
}

void TcpHandshake::hear(size_t bytes) {
  in_.clear();
  expected_ = bytes;
}

void TcpHandshake::broken(const std::string& reason) {
  reason_ = reason;
  step_ = Step::Broken;
}

}  // namespace ours
