#include "common/socket_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <charconv>
#include <cstring>
#include <memory>

#include "common/error.h"

namespace ours {

namespace {

const sockaddr_in& v4(const sockaddr_storage& storage) { return reinterpret_cast<const sockaddr_in&>(storage); }
const sockaddr_in6& v6(const sockaddr_storage& storage) { return reinterpret_cast<const sockaddr_in6&>(storage); }

/// The whole of `text` as a number up to `high`, or nothing.
std::optional<unsigned> parse_number(const std::string& text, unsigned high) {
  unsigned value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value);
  if (result.ec != std::errc() || result.ptr != end || value > high) return std::nullopt;
  return value;
}

std::optional<SocketAddress> parse_digits(const std::string& host, uint16_t port) {
  // inet_pton() would not see what follows.
  if (host.find('\0') != std::string::npos) return std::nullopt;
  sockaddr_in four{};
  if (::inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    four.sin_port = htons(port);
    return SocketAddress::from(reinterpret_cast<const sockaddr*>(&four), sizeof(four));
  }
  sockaddr_in6 six{};
  if (::inet_pton(AF_INET6, host.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    six.sin6_port = htons(port);
    return SocketAddress::from(reinterpret_cast<const sockaddr*>(&six), sizeof(six));
  }
  return std::nullopt;
}

}  // namespace

std::optional<SocketAddress> SocketAddress::parse(const std::string& text) {
  std::string host = text;
  std::string port;
  if (!text.empty() && text[0] == '[') {
    const size_t close = text.find("]:");
    if (close == std::string::npos) return std::nullopt;
    host = text.substr(1, close - 1);
    port = text.substr(close + 2);
    if (host.find(':') == std::string::npos) return std::nullopt;
  } else if (const size_t colon = text.find(':'); colon != std::string::npos && colon == text.rfind(':')) {
    host = text.substr(0, colon);
    port = text.substr(colon + 1);
  } else {
    return parse_digits(text, 0);
  }
  const auto number = parse_number(port, UINT16_MAX);
  if (!number) return std::nullopt;
  return parse_digits(host, static_cast<uint16_t>(*number));
}

std::optional<SocketAddress> SocketAddress::from(const sockaddr* address, socklen_t length) {
  if (address == nullptr || length < static_cast<socklen_t>(sizeof(sa_family_t))) return std::nullopt;
  const bool fits = (address->sa_family == AF_INET && length >= static_cast<socklen_t>(sizeof(sockaddr_in))) ||
                    (address->sa_family == AF_INET6 && length >= static_cast<socklen_t>(sizeof(sockaddr_in6)));
  if (!fits) return std::nullopt;
  SocketAddress result;
  std::memcpy(&result.storage_, address, address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
  return result;
}

std::vector<SocketAddress> SocketAddress::resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) throw Error("cannot resolve the host name '" + host + "': " + ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  std::vector<SocketAddress> all;
  for (const addrinfo* info = found; info != nullptr; info = info->ai_next) {
    if (const auto address = from(info->ai_addr, info->ai_addrlen)) all.push_back(*address);
  }
  return all;
}

uint16_t SocketAddress::port() const {
  return ntohs(family() == AF_INET ? v4(storage_).sin_port : v6(storage_).sin6_port);
}

SocketAddress SocketAddress::with_port(uint16_t port) const {
  SocketAddress result = *this;
  if (family() == AF_INET) {
    reinterpret_cast<sockaddr_in&>(result.storage_).sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6&>(result.storage_).sin6_port = htons(port);
  }
  return result;
}

bool SocketAddress::is_loopback() const {
  return family() == AF_INET ? bytes()[0] == 127 : IN6_IS_ADDR_LOOPBACK(&v6(storage_).sin6_addr) != 0;
}

bool SocketAddress::is_link_local() const {
  return family() == AF_INET ? bytes()[0] == 169 && bytes()[1] == 254
                             : IN6_IS_ADDR_LINKLOCAL(&v6(storage_).sin6_addr) != 0;
}

std::string SocketAddress::host() const {
  char text[INET6_ADDRSTRLEN] = {};
  ::inet_ntop(family(), bytes(), text, sizeof(text));
  return text;
}

std::string SocketAddress::text() const {
  const std::string name = host();
  return (family() == AF_INET6 ? '[' + name + ']' : name) + ':' + std::to_string(port());
}

const uint8_t* SocketAddress::bytes() const {
  return family() == AF_INET ? reinterpret_cast<const uint8_t*>(&v4(storage_).sin_addr)
                             : v6(storage_).sin6_addr.s6_addr;
}

size_t SocketAddress::byte_count() const { return family() == AF_INET ? 4 : 16; }

socklen_t SocketAddress::size() const { return family() == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6); }

bool operator==(const SocketAddress& a, const SocketAddress& b) {
  return a.family() == b.family() && a.port() == b.port() && std::memcmp(a.bytes(), b.bytes(), a.byte_count()) == 0;
}

std::optional<Cidr> Cidr::parse(const std::string& text) {
  const size_t slash = text.find('/');
  const auto network = parse_digits(text.substr(0, slash), 0);
  if (!network) return std::nullopt;
  const auto most = static_cast<unsigned>(network->byte_count() * 8);
  if (slash == std::string::npos) return Cidr(*network, most);
  const auto bits = parse_number(text.substr(slash + 1), most);
  if (!bits) return std::nullopt;
  return Cidr(*network, *bits);
}

bool Cidr::contains(const SocketAddress& address) const {
  if (address.family() != network_.family()) return false;
  const unsigned whole = bits_ / 8;
  if (std::memcmp(address.bytes(), network_.bytes(), whole) != 0) return false;
  const unsigned rest = bits_ % 8;
  if (rest == 0) return true;
  const unsigned mask = 0xFF00u >> rest & 0xFFu;
  return ((address.bytes()[whole] ^ network_.bytes()[whole]) & mask) == 0;
}

}  // namespace ours
