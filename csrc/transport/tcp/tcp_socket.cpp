#include "transport/tcp/tcp_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/random.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <string>
#include <system_error>

#include "common/descriptors.h"
#include "common/error.h"

namespace ours {

namespace {

void set(int fd, int level, int name, int value) { ::setsockopt(fd, level, name, &value, sizeof(value)); }

ProcessFd make_socket(int family, int type = SOCK_STREAM) {
  return ProcessFd(with_descriptors([&] { return ::socket(family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }));
}

/// Lets the groups of one process begin at different places of the range.
uint32_t any_number() {
  uint32_t number = 0;
  if (::getrandom(&number, sizeof(number), GRND_NONBLOCK) != sizeof(number)) return 0;
  return number;
}

/// A socket at `address`, on a port of the range, that waits for peers. `prepare` is called before it gets its port.
/// Throws a SystemError that begins with `purpose`.
ProcessFd open_in(const PortRange& ports, const SocketAddress& address, const std::string& purpose, int type,
                  const std::function<void(int)>& prepare) {
  const uint32_t count = static_cast<uint32_t>(ports.last) - ports.first + 1;
  const uint32_t start = any_number();
  int error = 0;
  for (uint32_t i = 0; i < count; ++i) {
    ProcessFd fd = make_socket(address.family(), type);
    if (!fd.valid()) throw SystemError("cannot make a socket", errno);
    if (address.family() == AF_INET6) set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
    prepare(fd.get());
    const SocketAddress at = address.with_port(static_cast<uint16_t>(ports.first + (start + i) % count));
    const bool has_port = ::bind(fd.get(), at.data(), at.size()) == 0;
    if (has_port && (type != SOCK_STREAM || ::listen(fd.get(), SOMAXCONN) == 0)) return fd;
    error = errno;
    if (error != EADDRINUSE && error != EACCES) break;
  }
  const std::string range = ports.first == 0 ? ""
                                             : " on a port from " + std::to_string(ports.first) + " to " +
                                                   std::to_string(ports.last) + " (OURS_PORT_RANGE)";
  throw SystemError(purpose + address.host() + range, error);
}

}  // namespace

std::string text_of_error(int error) { return std::generic_category().message(error); }

bool use_congestion_control(int fd, const std::string& name) {
  return name.empty() ||
         ::setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), static_cast<socklen_t>(name.size())) == 0;
}

ProcessFd listen_at(const SocketAddress& address, const PortRange& ports, const std::string& congestion) {
  return open_in(ports, address, "cannot wait for connections at ", SOCK_STREAM, [&](int fd) {
    if (!use_congestion_control(fd, congestion)) {
      throw SystemError("OURS_TCP_CONGESTION='" + congestion +
                            "' is none of those that this process may use here, which `sysctl "
                            "net.ipv4.tcp_allowed_congestion_control` lists",
                        errno);
    }
    // This allows ports on which connections of an earlier job are still closing. If two sockets get the same port, the
    // second one cannot listen.
    set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  });
}

ProcessFd receive_at(const SocketAddress& address, const PortRange& ports) {
  return open_in(ports, address, "cannot wait for packets at ", SOCK_DGRAM, [](int) {});
}

SocketAddress local_address(int fd) {
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (::getsockname(fd, address, &length) != 0) throw SystemError("cannot tell the address of a socket", errno);
  const auto known = SocketAddress::from(address, length);
  if (!known) throw Error("a socket has an address of an unknown family");
  return *known;
}

ProcessFd begin_connecting(const SocketAddress& address, const std::string& congestion) {
  ProcessFd fd = make_socket(address.family());
  if (!fd.valid()) return fd;
  if (!use_congestion_control(fd.get(), congestion)) {
    const int error = errno;
    fd.reset();
    errno = error;
    return fd;
  }
  if (::connect(fd.get(), address.data(), address.size()) != 0 && errno != EINPROGRESS) {
    const int error = errno;
    fd.reset();
    errno = error;
  }
  return fd;
}

ProcessFd accept_from(int listener) {
  return ProcessFd(
      with_descriptors([&] { return ::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC); }));
}

void tune_connection(int fd) {
  constexpr int kIdleSeconds = 10;
  constexpr int kProbeSeconds = 5;
  constexpr int kProbes = 4;
  set(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleSeconds);
  set(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeSeconds);
  set(fd, IPPROTO_TCP, TCP_KEEPCNT, kProbes);
}

void limit_silence(int fd, std::chrono::milliseconds limit) {
  set(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(limit.count()));
}

bool is_unanswered(int fd, std::chrono::milliseconds limit) {
  tcp_info info{};
  socklen_t length = sizeof(info);
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  // By the clock of keepalive, which asks when nothing comes: it counts data, since that need not acknowledge anything.
  const std::chrono::milliseconds silent(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
  return info.tcpi_unacked > 0 && silent > limit;
}

}  // namespace ours
