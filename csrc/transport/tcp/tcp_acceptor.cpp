#include "transport/tcp/tcp_acceptor.h"

namespace ours {

namespace {

constexpr std::chrono::seconds kPeerLimit{10};

}  // namespace

void TcpAcceptor::listen(const TcpConfig& config, const std::string& congestion, TcpCard& card) {
  listener_ = TcpListener::of(config, congestion);
  place_ = listener_->open([this] { poller_.wake(); });
  poller_.watch_listener(listener_);
  card.addresses = listener_->addresses();
  card.paths = listener_->paths();
  card.mesh = place_->number;
}

bool TcpAcceptor::advance() {
  if (!listener_) return false;
  if (poller_.listener_moved || listener_->is_busy()) serve();
  if (place_->has_arrived.load(std::memory_order_acquire)) {
    for (TcpHandshake& handshake : listener_->take_arrived(*place_)) arrived_.push_back(std::move(handshake));
  }
  answer_arrived();
  bool ended = false;
  for (auto one = incoming_.begin(); one != incoming_.end();) {
    const auto state = one->handshake.advance();
    if (state == TcpHandshake::State::Going && Clock::now() <= one->arrived + kPeerLimit) {
      ++one;
      continue;
    }
    host_.admitted(one->handshake, state == TcpHandshake::State::Done);
    ended = true;
    one = incoming_.erase(one);
  }
  return ended;
}

void TcpAcceptor::serve() {
  poller_.listener_moved = false;
  for (int lack = listener_->serve(); lack != 0; lack = listener_->serve()) {
    if (!host_.lacks_descriptors("accept the connection of a peer", lack)) return;
  }
}

void TcpAcceptor::answer_arrived() {
  for (auto one = arrived_.begin(); one != arrived_.end();) {
    // This rank may have had other things to do for so long that the peer has given up, and tries another address.
    const bool deserted = one->is_deserted();
    if (!deserted && host_.is_undecided(*one)) {
      ++one;
      continue;
    }
    if (!deserted) answer(*one);
    one = arrived_.erase(one);
  }
}

void TcpAcceptor::answer(TcpHandshake& handshake) {
  poller_.watch_handshake(handshake.fd());  // before anything changes, since it may throw
  if (host_.admit(handshake)) {
    handshake.answer(Verdict::Welcome);
    incoming_.push_back({std::move(handshake), Clock::now()});
  } else {
    handshake.answer(Verdict::Insists);
    handshake.advance();
  }
}

void TcpAcceptor::close() noexcept {
  arrived_.clear();
  incoming_.clear();
  if (!listener_) return;
  listener_->close(place_);
  listener_.reset();
  poller_.watch_listener(nullptr);  // it ends with the last who holds it
}

}  // namespace ours
