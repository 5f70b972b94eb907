#include "support/tcp_puppet.h"

#include <sys/socket.h>
#include <unistd.h>

#include <thread>

#include "transport/tcp/tcp_socket.h"

namespace ours::testing {

Puppet::Puppet(int size, std::shared_ptr<MapKeys> keys, int data_streams) : keys_(std::move(keys)) {
  self_.size = size;
  terms_.plan.streams = data_streams;
  terms_.secret = self_.secret = draw_nonce();
  self_.streams = terms_.plan.streams + 1;
  listener_ = listen_at(*SocketAddress::parse("127.0.0.1"), PortRange{});
  TcpCard card;
  card.machine = machine_id();
  card.addresses = {local_address(listener_.get())};
  keys_->set(card_key(0), card.text());
  keys_->set(kTermsKey, terms_.text());
}

void Puppet::connect(int rank) {
  const auto card = TcpCard::parse(keys_->get(card_key(rank), Deadline::after(std::chrono::seconds(10))));
  for (int stream = 0; stream < self_.streams; ++stream) {
    TcpHandshake handshake(begin_connecting(card.addresses[0]), self_, rank, card.mesh, stream);
    const auto patience = Deadline::after(std::chrono::seconds(10));
    auto state = handshake.advance();
    for (; state == TcpHandshake::State::Going && !patience.passed(); state = handshake.advance()) {
      std::this_thread::yield();
    }
    if (state != TcpHandshake::State::Done) throw Failure("the puppet was refused: " + handshake.reason());
    fds_.push_back(handshake.take_fd());
  }
}

void Puppet::send(int stream, const void* data, size_t bytes) {
  [[maybe_unused]] const ssize_t sent = ::send(fd(stream), data, bytes, MSG_NOSIGNAL);
}

std::string Puppet::receive(int stream, size_t bytes) {
  std::string data(bytes, '\0');
  const auto patience = Deadline::after(std::chrono::seconds(10));
  for (size_t got = 0; got < bytes;) {
    if (patience.passed()) throw Failure("the puppet's peer has not sent what was expected");
    const ssize_t more = ::recv(fd(stream), data.data() + got, bytes - got, MSG_DONTWAIT);
    if (more > 0) got += static_cast<size_t>(more);
    if (more == 0) throw Failure("the puppet's peer has closed stream " + std::to_string(stream));
    std::this_thread::yield();
  }
  return data;
}

void Puppet::die(bool abruptly) {
  const linger now{1, 0};
  for (const ProcessFd& fd : fds_) {
    if (abruptly) ::setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &now, sizeof(now));
  }
  fds_.clear();
  listener_.reset();
}

Meshes join_others(int n, const std::shared_ptr<MapKeys>& keys) {
  Meshes meshes(1);
  for (int r = 1; r < n; ++r) {
    meshes.push_back(join_mesh(r, n, keys));
    std::vector<std::string> names(static_cast<size_t>(n), process_name("here", ::getpid()));
    names[0] = process_name("puppet", 4711);
    meshes.back()->introduce(names);
  }
  return meshes;
}

}  // namespace ours::testing
