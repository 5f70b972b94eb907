#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"

namespace ours::testing {

/// A rank 0 whose connections a test uses as it likes. It connects to the others, because of two ranks that connect
/// to each other, the lower one's connection counts.
class Puppet {
 public:
  Puppet(int size, std::shared_ptr<MapKeys> keys) : keys_(std::move(keys)) {
    self_.size = size;
    self_.host = "puppet";
    self_.pid = 4711;
    terms_.secret = self_.secret = draw_nonce();
    self_.streams = terms_.plan.streams + 1;
    listener_ = listen_at(*SocketAddress::parse("127.0.0.1"), PortRange{});
    TcpCard card;
    card.machine = machine_id();
    card.addresses = {local_address(listener_.get())};
    keys_->set(card_key(0), card.text());
    keys_->set(kTermsKey, terms_.text());
  }

  /// Connects all streams to `rank`, which must be in a call or looking.
  void connect(int rank) {
    const auto card = TcpCard::parse(keys_->get(card_key(rank), Deadline::after(std::chrono::seconds(10))));
    for (int stream = 0; stream < self_.streams; ++stream) {
      TcpHandshake handshake(begin_connecting(card.addresses[0]), self_, rank, stream);
      const auto patience = Deadline::after(std::chrono::seconds(10));
      auto state = handshake.advance();
      for (; state == TcpHandshake::State::Going && !patience.passed(); state = handshake.advance()) {
        std::this_thread::yield();
      }
      if (state != TcpHandshake::State::Done) throw Failure("the puppet was refused: " + handshake.reason());
      fds_.push_back(handshake.take_fd());
    }
  }

  /// The connection of that stream to the rank that was connected to first.
  int fd(int stream) const { return fds_[static_cast<size_t>(stream)].get(); }

  void send(int stream, const void* data, size_t bytes) {
    [[maybe_unused]] const ssize_t sent = ::send(fd(stream), data, bytes, MSG_NOSIGNAL);
  }

  /// Closes everything, as the system does when a process is killed; `abruptly`: with a reset instead of an end.
  void die(bool abruptly) {
    const linger now{1, 0};
    for (const ProcessFd& fd : fds_) {
      if (abruptly) ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    }
    fds_.clear();
    listener_.reset();
  }

 private:
  std::shared_ptr<MapKeys> keys_;
  TcpSelf self_;
  TcpTerms terms_;
  ProcessFd listener_;
  std::vector<ProcessFd> fds_;
};

/// Ranks 1 to n - 1 of a group whose rank 0 is a puppet, by rank.
inline Meshes join_others(int n, const std::shared_ptr<MapKeys>& keys) {
  Meshes meshes(1);
  for (int r = 1; r < n; ++r) {
    meshes.push_back(TcpMesh::join(r, n, keys, loopback_config(), Deadline::after(std::chrono::seconds(10))));
    std::vector<std::string> names(static_cast<size_t>(n), own_name());
    names[0] = "(host puppet, pid 4711)";
    meshes.back()->introduce(names);
  }
  return meshes;
}

}  // namespace ours::testing
