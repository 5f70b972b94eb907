#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ours {

class SocketAddress {
 public:
  /// Parses "10.0.0.1", "10.0.0.1:80", "fd00::1" or "[fd00::1]:80"; nothing if it is something else, such as a name.
  /// The port is 0 if the text has none.
  static std::optional<SocketAddress> parse(const std::string& text);

  /// Nothing for other address families, and for a length that does not fit.
  static std::optional<SocketAddress> from(const sockaddr* address, socklen_t length);

  /// All addresses of `host`, a name or an address, with port 0. Throws Error with the resolver's reason.
  static std::vector<SocketAddress> resolve(const std::string& host);

  int family() const { return storage_.ss_family; }
  uint16_t port() const;
  SocketAddress with_port(uint16_t port) const;
  bool is_loopback() const;
  /// Whether it is usable only together with its interface.
  bool is_link_local() const;

  /// The address without the port: "fd00::1".
  std::string host() const;
  /// The address with the port, in the form that parse() reads.
  std::string text() const;

  const uint8_t* bytes() const;
  size_t byte_count() const;

  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const;

 private:
  SocketAddress() = default;

  sockaddr_storage storage_{};
};

bool operator==(const SocketAddress& a, const SocketAddress& b);

/// A network such as 10.0.0.0/8 or fd00::/8. An address without a length is a network of one.
class Cidr {
 public:
  static std::optional<Cidr> parse(const std::string& text);
  bool contains(const SocketAddress& address) const;

 private:
  Cidr(const SocketAddress& network, unsigned bits) : network_(network), bits_(bits) {}

  SocketAddress network_;
  unsigned bits_;
};

}  // namespace ours
