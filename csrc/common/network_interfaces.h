#pragma once

#include <string>
#include <vector>

#include "common/socket_address.h"

namespace ours {

/// One address of one network interface that is up.
struct InterfaceAddress {
  std::string name;
  SocketAddress address;
  bool loopback;
};

/// Those of this machine (of this network namespace).
std::vector<InterfaceAddress> interface_addresses();

/// The addresses of `all` that `wanted` names: interfaces ("eth0"), networks ("10.0.0.0/8") or addresses, separated by
/// commas; "^" before the list means all others but loopback. In the order of `wanted`, each once. Throws
/// InvalidArgument that lists what there is where nothing matches.
std::vector<SocketAddress> match_addresses(const std::string& wanted, const std::vector<InterfaceAddress>& all);

/// The addresses under which peers that know `master`, a name or digits, reach this machine: the local end of the route
/// to it, then the other addresses of the same interface, so that both families are there. Where the master's name
/// leads to this machine's own loopback, as a line like "127.0.1.1 thishost" in /etc/hosts makes it, that says nothing
/// about the way from other machines: then those of all interfaces, loopback last. Without a master the same. Throws
/// Error that lists the addresses tried.
std::vector<SocketAddress> addresses_towards(const std::string& master, const std::vector<InterfaceAddress>& all);

}  // namespace ours
