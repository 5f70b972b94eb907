#include "common/network_interfaces.h"
#include "common/socket_address.h"
#include "fuzz/parser.h"

// Addresses, networks, and the list of them in OURS_INTERFACE.

namespace ours::fuzz {
namespace {

std::vector<Seed> seeds() {
  return {{"v4", "10.1.2.3:80"},          {"v6", "[fd00::1%eth0]:81"}, {"short", "::1"},
          {"network", "10.0.0.0/9"},      {"network6", "fd00::/65"},   {"list", "eth0,192.168.0.0/16,fd00::1"},
          {"others", "^lo,docker0,10/8"}, {"mapped", "::ffff:1.2.3.4"}};
}

std::vector<InterfaceAddress> interfaces() {
  return {{"lo", *SocketAddress::parse("127.0.0.1"), true},
          {"eth0", *SocketAddress::parse("10.1.2.3"), false},
          {"eth0", *SocketAddress::parse("fd00::1"), false},
          {"eth0", *SocketAddress::parse("fe80::1"), false},
          {"eth1", *SocketAddress::parse("192.168.7.9"), false}};
}

void parse(const Bytes& input) {
  static const std::vector<InterfaceAddress> kInterfaces = interfaces();
  if (const auto address = SocketAddress::parse(input)) {
    require(SocketAddress::parse(address->text()) == address, "an address can be written");
    require(address->with_port(7).port() == 7 && address->with_port(7).host() == address->host(), "ports are apart");
  }
  if (const auto network = Cidr::parse(input)) {
    for (const InterfaceAddress& one : kInterfaces) (void)network->contains(one.address);
    const auto own = SocketAddress::parse(input.substr(0, input.find('/')));
    require(own && network->contains(*own), "an address is in its network");
  }
  const auto found = match_addresses(input, kInterfaces);
  require(!found.addresses.empty() && found.addresses.size() <= kInterfaces.size(), "only what there is can match");
  require(found.paths >= 1 && found.paths <= found.addresses.size(), "a path is an address");
}

const Registration registration("addresses", seeds, parse);

}  // namespace
}  // namespace ours::fuzz
