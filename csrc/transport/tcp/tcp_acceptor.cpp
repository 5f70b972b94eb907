#include "transport/tcp/tcp_acceptor.h"

#include <algorithm>
#include <cerrno>

#include "common/descriptors.h"
#include "common/error.h"
#include "common/network_interfaces.h"
#include "transport/tcp/tcp_socket.h"

namespace ours {

namespace {

constexpr size_t kMostStrangers = 64;
constexpr std::chrono::seconds kStrangerLimit{10};
constexpr std::chrono::milliseconds kTimeToSpeak{500};

}  // namespace

std::vector<SocketAddress> TcpAcceptor::listen(const TcpConfig& config, const std::string& congestion) {
  const std::vector<InterfaceAddress> all = interface_addresses();
  std::vector<SocketAddress> addresses;
  std::string failures;
  for (const SocketAddress& address :
       config.interface.empty() ? addresses_towards(config.master, all) : match_addresses(config.interface, all)) {
    try {
      listeners_.push_back(listen_at(address, config.ports, congestion));
    } catch (const SystemError& e) {
      // The address may belong to a family that is switched off, or may just be going away.
      failures += std::string(failures.empty() ? "" : "; ") + e.what();
      continue;
    }
    addresses.push_back(local_address(listeners_.back().get()));
    poller_.watch_listener(listeners_.back().get());
  }
  if (addresses.empty()) {
    throw Error("no address to wait for peers at: " + (failures.empty() ? "none found" : failures));
  }
  return addresses;
}

bool TcpAcceptor::advance() {
  if (poller_.listeners_moved || queue_left_) {
    poller_.listeners_moved = queue_left_ = false;
    for (const ProcessFd& listener : listeners_) accept_from_queue(listener.get());
  }
  if (incoming_.empty()) return false;
  bool ended = false;
  const auto now = Clock::now();
  for (auto one = incoming_.begin(); one != incoming_.end();) {
    TcpHandshake& handshake = one->handshake;
    auto state = handshake.advance();
    if (handshake.awaits_verdict()) {
      if (!host_.admit(handshake)) {
        one = incoming_.erase(one);
        continue;
      }
      handshake.accept();
      state = handshake.advance();
    }
    if (state == TcpHandshake::State::Going && now <= one->arrived + kStrangerLimit) {
      ++one;
      continue;
    }
    if (handshake.peer() >= 0) {
      host_.admitted(handshake, state == TcpHandshake::State::Done);
      ended = true;
    }
    one = incoming_.erase(one);
  }
  return ended;
}

void TcpAcceptor::accept_from_queue(int listener) {
  while (!queue_left_) {
    if (!has_room()) {
      queue_left_ = true;
      return;
    }
    ProcessFd fd = accept_from(listener);
    if (fd.valid()) {
      tune_connection(fd.get());
      poller_.watch_handshake(fd.get());
      incoming_.push_back({TcpHandshake(std::move(fd), self_), Clock::now()});
      continue;
    }
    if (errno == EAGAIN) return;
    const int error = errno;
    const bool is_lack = is_lack_of_descriptors(error);
    if (!is_lack && error != ENOBUFS && error != ENOMEM) continue;  // that connection ended before it was accepted
    // Set before the host may throw, so that the queue is checked again.
    queue_left_ = true;
    if (is_lack && host_.lacks_descriptors("accept the connection of a peer", error)) queue_left_ = false;
  }
}

bool TcpAcceptor::has_room() {
  if (incoming_.size() < kMostStrangers + self_.most_connections()) return true;
  const auto oldest = oldest_stranger();
  if (oldest == incoming_.end()) return true;
  if (Clock::now() < oldest->arrived + kTimeToSpeak) return false;
  incoming_.erase(oldest);
  return true;
}

std::list<TcpAcceptor::Incoming>::iterator TcpAcceptor::oldest_stranger() {
  return std::find_if(incoming_.begin(), incoming_.end(), [](const Incoming& one) { return one.handshake.peer() < 0; });
}

bool TcpAcceptor::send_stranger_away() {
  const auto oldest = oldest_stranger();
  if (oldest == incoming_.end()) return false;
  incoming_.erase(oldest);
  return true;
}

void TcpAcceptor::close() {
  incoming_.clear();
  listeners_.clear();
}

}  // namespace ours
