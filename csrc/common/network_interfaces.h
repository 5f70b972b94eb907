#pragma once

#include <string>
#include <vector>

#include "common/socket_address.h"

namespace ours {

struct InterfaceAddress {
  std::string name;
  SocketAddress address;
  bool loopback;
};

/// The addresses of the interfaces of this machine (in this network namespace) that are up.
std::vector<InterfaceAddress> interface_addresses();

/// The addresses at which a machine can be reached.
struct OwnAddresses {
  std::vector<SocketAddress> addresses;
  size_t paths = 1;  ///< how many of them, from the first on, share the data
};

/// The addresses in `all` that `wanted` names: interfaces ("eth0"), networks ("10.0.0.0/8") or addresses, separated by
/// commas; "^" before the list means all others except loopback. Without "^", the first address of each name comes
/// first, in the order of `wanted`, unless its interface has one there: these are the paths. The others follow. None is
/// repeated. If none matches, throws InvalidArgument, which lists what there is.
OwnAddresses match_addresses(const std::string& wanted, const std::vector<InterfaceAddress>& all);

/// The addresses at which peers that know `master`, a name or an address, can reach this machine: the local end of the
/// route to it, then the other addresses of the same interface, so that both address families are included. Without a
/// master, or if its name leads to this machine's loopback (as "127.0.1.1 thishost" in /etc/hosts does), the addresses
/// of all interfaces, with loopback last. Throws Error, which lists the addresses tried.
std::vector<SocketAddress> addresses_towards(const std::string& master, const std::vector<InterfaceAddress>& all);

/// The addresses at which ranks of other nodes reach this one: those that `wanted` names or, if it is empty, those
/// towards `master`.
OwnAddresses own_addresses(const std::string& wanted, const std::string& master);

}  // namespace ours
