#include "common/network_interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <set>
#include <sstream>

#include "common/error.h"
#include "common/fd.h"
#include "common/listed.h"

namespace ours {

namespace {

using Addresses = std::vector<SocketAddress>;

void add(Addresses& to, const SocketAddress& address) {
  if (std::find(to.begin(), to.end(), address) == to.end()) to.push_back(address);
}

std::string shown(const std::vector<InterfaceAddress>& all) {
  if (all.empty()) return "none";
  return listed(all, [](const InterfaceAddress& one) { return one.name + ' ' + one.address.host(); });
}

/// The local address from which a packet to `target` would leave. Nothing is sent.
std::optional<SocketAddress> route_source(const SocketAddress& target) {
  const Fd fd(::socket(target.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // Port 0 would be refused by some systems.
  const SocketAddress with_port = target.with_port(9);
  if (!fd.valid() || ::connect(fd.get(), with_port.data(), with_port.size()) != 0) return std::nullopt;
  sockaddr_storage storage{};
  socklen_t length = sizeof(storage);
  auto* address = reinterpret_cast<sockaddr*>(&storage);
  if (::getsockname(fd.get(), address, &length) != 0) return std::nullopt;
  const auto found = SocketAddress::from(address, length);
  if (!found) return std::nullopt;
  return found->with_port(0);
}

/// The addresses of all interfaces, with loopback last.
Addresses everything(const std::vector<InterfaceAddress>& all) {
  Addresses found;
  for (const bool loopback : {false, true}) {
    for (const InterfaceAddress& one : all) {
      if (one.loopback == loopback && !one.address.is_link_local()) add(found, one.address);
    }
  }
  return found;
}

}  // namespace

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* first = nullptr;
  if (::getifaddrs(&first) != 0) throw SystemError("cannot list the network interfaces (getifaddrs)", errno);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(first, &::freeifaddrs);
  std::vector<InterfaceAddress> all;
  for (const ifaddrs* one = first; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const auto address = SocketAddress::from(one->ifa_addr, sizeof(sockaddr_storage));
    if (address) all.push_back({one->ifa_name, *address, (one->ifa_flags & IFF_LOOPBACK) != 0});
  }
  return all;
}

OwnAddresses match_addresses(const std::string& wanted, const std::vector<InterfaceAddress>& all) {
  const bool others = !wanted.empty() && wanted[0] == '^';
  const auto matches = [](const std::string& item, const InterfaceAddress& one) {
    const auto network = Cidr::parse(item);
    return network ? network->contains(one.address) : item == one.name;
  };
  std::vector<std::string> items;
  std::istringstream list(wanted.substr(others ? 1 : 0));
  for (std::string item; std::getline(list, item, ',');) {
    if (!item.empty()) items.push_back(item);
  }
  Addresses found, more;
  if (others) {
    for (const InterfaceAddress& one : all) {
      const bool named = std::any_of(items.begin(), items.end(), [&](const auto& item) { return matches(item, one); });
      if (!named && !one.loopback && !one.address.is_link_local()) add(found, one.address);
    }
  } else {
    std::set<std::string> paths;  // interfaces
    for (const std::string& item : items) {
      bool has_path = false;
      for (const InterfaceAddress& one : all) {
        if (!matches(item, one) || one.address.is_link_local()) continue;
        const bool is_path = !has_path && paths.insert(one.name).second;
        has_path = has_path || is_path;
        add(is_path ? found : more, one.address);
      }
    }
  }
  if (found.empty()) {
    throw InvalidArgument("no usable network address matches '" + wanted + "'; this machine has: " + shown(all) +
                          ". Give names of interfaces, networks such as 10.0.0.0/8, or ^ and a list of those to avoid");
  }
  const size_t paths = others ? 1 : found.size();
  for (const SocketAddress& address : more) add(found, address);
  return {found, paths};
}

Addresses addresses_towards(const std::string& master, const std::vector<InterfaceAddress>& all) {
  if (master.empty()) return everything(all);
  Addresses found;
  std::string tried;
  for (const SocketAddress& target : SocketAddress::resolve(master)) {
    tried += (tried.empty() ? "" : ", ") + target.host();
    if (const auto source = route_source(target)) add(found, *source);
  }
  if (found.empty()) {
    throw Error("no route to the master '" + master + "' (tried " + tried + "); this machine has: " + shown(all) +
                ". Is the master's address right, and is the network up?");
  }
  const bool own = std::all_of(found.begin(), found.end(), [](const auto& address) { return address.is_loopback(); });
  if (own && master != "localhost" && !SocketAddress::parse(master)) return everything(all);

  // All routes may be of one address family, but their interface may have addresses of both.
  const Addresses routed = found;
  for (const InterfaceAddress& one : all) {
    const bool used = std::any_of(all.begin(), all.end(), [&](const InterfaceAddress& other) {
      return other.name == one.name && std::find(routed.begin(), routed.end(), other.address) != routed.end();
    });
    if (used && !one.address.is_link_local()) add(found, one.address);
  }
  return found;
}

OwnAddresses own_addresses(const std::string& wanted, const std::string& master) {
  const std::vector<InterfaceAddress> all = interface_addresses();
  return wanted.empty() ? OwnAddresses{addresses_towards(master, all)} : match_addresses(wanted, all);
}

}  // namespace ours
