#include "transport/tcp/tcp_attempt.h"

#include <utility>

namespace ours {

namespace {

constexpr std::chrono::milliseconds kBetweenRounds{50};
/// How long to wait until a connection is made,
constexpr std::chrono::seconds kConnectLimit{2};
/// and until a peer, which may be busy, says something, if it has other addresses to try.
constexpr std::chrono::seconds kWordsLimit{30};
constexpr std::chrono::hours kForever{24 * 365};
/// After this many rounds in which every address refused, the peer is taken to be gone.
constexpr int kRefusedRounds = 2;

}  // namespace

void TcpAttempt::begin(TcpHandshake handshake) {
  handshake_.emplace(std::move(handshake));
  late_ = nullptr;
  next_ = Clock::now() + kConnectLimit;
}

TcpHandshake::State TcpAttempt::advance(bool has_others) {
  if (!handshake_) return TcpHandshake::State::Going;
  const auto now = Clock::now();
  const bool was_connected = handshake_->connected();
  const auto state = handshake_->advance();
  if (state != TcpHandshake::State::Going) return state;
  if (!was_connected && handshake_->connected()) {
    next_ = now + (has_others ? Clock::duration(kWordsLimit) : Clock::duration(kForever));
  }
  if (now < next_) return state;
  late_ = handshake_->connected() ? "connected, but nobody speaks" : "no answer";
  return TcpHandshake::State::Broken;
}

bool TcpAttempt::try_next(const std::vector<SocketAddress>& addresses, const std::string& reason, bool refused) {
  handshake_.reset();
  if (address_ == first_) {
    tried_.clear();
    refused_ = 0;
  }
  tried_ += (tried_.empty() ? "" : ", ") + addresses[address_].text() + " (" + reason + ")";
  refused_ += refused ? 1 : 0;
  next_ = Clock::now();
  address_ = (address_ + 1) % addresses.size();
  if (address_ != first_) return false;
  next_ += kBetweenRounds;
  const bool nobody = refused_ == addresses.size();
  return ++rounds_ >= kRefusedRounds && nobody;
}

}  // namespace ours
