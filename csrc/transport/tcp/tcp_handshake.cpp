#include "transport/tcp/tcp_handshake.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "common/random.h"
#include "transport/tcp/tcp_socket.h"

namespace ours {

Nonce draw_nonce() { return draw_random<Nonce>(); }

TcpHandshake::TcpHandshake(ProcessFd fd) : fd_(std::move(fd)), accepting_(true), step_(Step::Send) {
  Challenge challenge;
  challenge.nonce = challenge_ = draw_nonce();
  say(&challenge, sizeof(challenge), Step::Receive);
  hear(sizeof(Hello));
}

TcpHandshake::TcpHandshake(ProcessFd fd, const TcpSelf& self, int to, uint32_t mesh, int stream)
    : fd_(std::move(fd)),
      secret_(self.secret),
      own_rank_(self.rank),
      accepting_(false),
      step_(Step::Connect),
      peer_(to),
      stream_(stream),
      mesh_(mesh) {
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
    // Those that it does not know it leaves without a word.
    refused_ = said_hello_ && in_.empty();
    if (refused_) return broken("nobody of the group answers there");
    broken("it closed the connection during the handshake");
    return;
  }
  in_.append(buffer, static_cast<size_t>(got));
  if (in_.size() == expected_) received();
}

void TcpHandshake::received() {
  if (accepting_) {
    std::memcpy(&hello_, in_.data(), sizeof(hello_));
    mesh_ = hello_.mesh;
    step_ = Step::Meet;
    return;
  }
  if (!said_hello_) {
    Challenge challenge;
    std::memcpy(&challenge, in_.data(), sizeof(challenge));
    if (!is_sound(challenge)) {
      broken("another program, or another version of this package, answers there");
      return;
    }
    challenge_ = challenge.nonce;
    hello_.from = static_cast<uint32_t>(own_rank_);
    hello_.to = static_cast<uint32_t>(peer_);
    hello_.stream = static_cast<uint32_t>(stream_);
    hello_.mesh = mesh_;
    hello_.nonce = draw_nonce();
    hello_.proof = proof_of(secret_, challenge_, hello_);
    say(&hello_, sizeof(hello_), Step::Receive);
    said_hello_ = true;
    hear(sizeof(Welcome));
    return;
  }
  Welcome welcome;
  std::memcpy(&welcome, in_.data(), sizeof(welcome));
  if (!is_sound(welcome, secret_, challenge_, hello_.nonce)) return broken("a rank of another group answers there");
  if (welcome.verdict == Verdict::Insists) return broken("it insists on its own connection");
  step_ = Step::Done;
}

void TcpHandshake::meet(const TcpSelf& self) {
  if (!is_sound(hello_, self.secret, challenge_, self.rank, self.size, self.streams)) {
    return broken("a stranger, or a rank of another group");
  }
  secret_ = self.secret;
  peer_ = static_cast<int>(hello_.from);
  stream_ = static_cast<int>(hello_.stream);
  step_ = Step::Judge;
}

void TcpHandshake::answer(Verdict verdict) {
  Welcome welcome;
  welcome.verdict = verdict;
  welcome.proof = proof_of(secret_, challenge_, hello_.nonce, welcome);
  say(&welcome, sizeof(welcome), Step::Done);
}

bool TcpHandshake::is_deserted() const {
  char next;
  const ssize_t got = ::recv(fd_.get(), &next, 1, MSG_PEEK);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
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
