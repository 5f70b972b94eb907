#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/deadline.h"
#include "transport/tcp/tcp_handshake.h"

namespace ours {

/// The efforts to connect one stream to a peer, whose addresses are tried in turn, from `first` on, until one leads to
/// it.
class TcpAttempt {
 public:
  /// `wait`: for how long to leave it to the peer.
  TcpAttempt(Clock::duration wait, size_t first) : next_(Clock::now() + wait), first_(first), address_(first) {}

  /// The number of the address that is tried.
  size_t address() const { return address_; }
  /// Whether it may still succeed: not all addresses have been tried in vain, or the peer may have agreed by now.
  bool is_promising() const { return rounds_ == 0 || (handshake_ && handshake_->said_hello()); }
  /// Whether it is time to connect to the address.
  bool is_due() const { return !handshake_ && Clock::now() >= next_; }
  /// A connection to the address is being made.
  void begin(TcpHandshake handshake);

  /// Goes on with the handshake, if there is one. `has_others`: the peer has further addresses to try.
  TcpHandshake::State advance(bool has_others);
  /// Ends it, once it is done.
  TcpHandshake take() { return *std::move(handshake_); }
  /// Why the address did not lead to the peer, once it is Broken.
  std::string reason() const { return late_ ? late_ : handshake_->reason(); }
  bool refused() const { return handshake_->refused(); }

  /// Goes on to the next address. Returns true if, as often as it takes to be sure, all have refused.
  bool try_next(const std::vector<SocketAddress>& addresses, const std::string& reason, bool refused);
  /// The addresses that were tried in the last round, and why in vain.
  const std::string& tried() const { return tried_; }

 private:
  std::optional<TcpHandshake> handshake_;
  Clock::time_point next_;      ///< when to begin, or to give up what has begun
  const char* late_ = nullptr;  ///< why it was given up
  const size_t first_;
  size_t address_;
  size_t refused_ = 0;  ///< addresses of this round that refused
  int rounds_ = 0;      ///< how often all addresses were tried
  std::string tried_;
};

}  // namespace ours
