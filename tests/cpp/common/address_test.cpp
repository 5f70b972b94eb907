#include <numeric>

#include "common/error.h"
#include "common/network_interfaces.h"
#include "common/siphash.h"
#include "common/socket_address.h"
#include "support/testing.h"

namespace ours::testing {
namespace {

SocketAddress address(const std::string& text) {
  const auto parsed = SocketAddress::parse(text);
  CHECK(parsed.has_value());
  return *parsed;
}

std::string hosts(const std::vector<SocketAddress>& addresses) {
  std::string text;
  for (const auto& one : addresses) text += (text.empty() ? "" : " ") + one.host();
  return text;
}

TEST(addresses_of_both_families_are_read_and_written) {
  for (const char* text : {"10.0.0.1:80", "[fd00::1]:65535", "127.0.0.1:1", "[::1]:0"}) {
    CHECK_EQ(address(text).text(), std::string(text));
  }
  CHECK_EQ(address("10.0.0.1").text(), std::string("10.0.0.1:0"));
  CHECK_EQ(address("fd00::1").with_port(7).text(), std::string("[fd00::1]:7"));
  CHECK(address("127.1.2.3").is_loopback() && address("::1").is_loopback() && !address("fd00::1").is_loopback());
  CHECK(address("fe80::1").is_link_local() && address("169.254.0.1").is_link_local());
  CHECK(!(address("10.0.0.1:1") == address("10.0.0.1:2")) && address("::1") == address("0:0:0::1"));
}

TEST(what_is_no_address_is_refused) {
  for (const char* text : {"", "host", "host:80", "10.0.0.1:", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0.1:8x", "10.0.0",
                           "[10.0.0.1]:80", "[fd00::1]", "[fd00::1]80", "fd00::1]:80", "fd00::g", "1.2.3.4:5:6"}) {
    CHECK(!SocketAddress::parse(text).has_value());
  }
  CHECK(!SocketAddress::parse(std::string("10.0.0.1\0:80", 12)).has_value());
  CHECK(!SocketAddress::from(nullptr, 16).has_value());
  const auto known = address("10.0.0.1:80");
  CHECK(!SocketAddress::from(known.data(), 3).has_value());
}

TEST(networks_contain_what_shares_their_first_bits) {
  const auto in = [](const char* network, const char* host) { return Cidr::parse(network)->contains(address(host)); };
  CHECK(in("10.0.0.0/8", "10.255.0.1") && !in("10.0.0.0/8", "11.0.0.1"));
  CHECK(in("10.0.0.128/25", "10.0.0.129") && !in("10.0.0.128/25", "10.0.0.127"));
  CHECK(in("0.0.0.0/0", "1.2.3.4") && !in("0.0.0.0/0", "::1"));
  CHECK(in("fd00::/9", "fd00::7") && in("fd00::/9", "fd7f::7") && !in("fd00::/9", "fd80::7"));
  CHECK(in("10.0.0.1", "10.0.0.1") && !in("10.0.0.1", "10.0.0.2"));
  for (const char* text : {"10.0.0.0/33", "10.0.0.0/", "10.0/8", "fd00::/129", "eth0", ""}) CHECK(!Cidr::parse(text));
}

std::vector<InterfaceAddress> some_interfaces() {
  return {{"lo", address("127.0.0.1"), true},       {"lo", address("::1"), true},
          {"eth0", address("10.0.0.5"), false},     {"eth0", address("fd00::5"), false},
          {"eth0", address("fe80::5"), false},      {"ib0", address("192.168.7.5"), false},
          {"docker0", address("172.17.0.1"), false}};
}

TEST(interfaces_are_chosen_by_name_network_and_exclusion) {
  const auto all = some_interfaces();
  CHECK_EQ(hosts(match_addresses("eth0", all).addresses), std::string("10.0.0.5 fd00::5"));
  CHECK_EQ(hosts(match_addresses("ib0,eth0", all).addresses), std::string("192.168.7.5 10.0.0.5 fd00::5"));
  CHECK_EQ(hosts(match_addresses("^docker0,ib0", all).addresses), std::string("10.0.0.5 fd00::5"));
  CHECK_EQ(hosts(match_addresses("192.168.0.0/16", all).addresses), std::string("192.168.7.5"));
  CHECK_EQ(hosts(match_addresses("^10.0.0.0/8,docker0", all).addresses), std::string("fd00::5 192.168.7.5"));
  CHECK_EQ(hosts(match_addresses("lo", all).addresses), std::string("127.0.0.1 ::1"));
  CHECK_EQ(hosts(match_addresses("fd00::5,eth0", all).addresses), std::string("fd00::5 10.0.0.5"));
  CHECK_EQ(hosts(match_addresses("eth0,ib0", all).addresses), std::string("10.0.0.5 192.168.7.5 fd00::5"));
  const std::string message = CHECK_THROWS(InvalidArgument, match_addresses("eth9", all));
  CHECK_CONTAINS(message, "'eth9'");
  CHECK_CONTAINS(message, "eth0 10.0.0.5");
}

TEST(each_named_interface_is_a_path) {
  const auto paths = [](const char* wanted) { return match_addresses(wanted, some_interfaces()).paths; };
  CHECK_EQ(paths("eth0"), 1U);
  CHECK_EQ(paths("eth0,ib0"), 2U);
  CHECK_EQ(paths("eth0,eth9,eth0,ib0,10.0.0.0/8"), 2U);
  CHECK_EQ(paths("10.0.0.0/8,fd00::5"), 1U);
  CHECK_EQ(paths("eth0,0.0.0.0/0"), 2U);
  CHECK_EQ(paths("^docker0"), 1U);
}

TEST(the_way_to_the_master_tells_the_address) {
  const auto all = interface_addresses();
  CHECK_EQ(addresses_towards("127.0.0.1", all)[0].host(), std::string("127.0.0.1"));
  for (const auto& one : addresses_towards("localhost", all)) CHECK(one.is_loopback());
  CHECK_CONTAINS(CHECK_THROWS(Error, addresses_towards("no-such-host.invalid", all)), "no-such-host.invalid");

  // Nothing to go by: what other machines may know comes first.
  CHECK_EQ(hosts(addresses_towards("", some_interfaces())),
           std::string("10.0.0.5 fd00::5 192.168.7.5 172.17.0.1 127.0.0.1 ::1"));
}

TEST(siphash_gives_the_published_values) {
  SipKey key;
  std::iota(key.begin(), key.end(), uint8_t{0});
  uint8_t message[64];
  std::iota(std::begin(message), std::end(message), uint8_t{0});
  CHECK_EQ(siphash(key, message, 0), uint64_t{0x726fdb47dd0e0e31});
  CHECK_EQ(siphash(key, message, 1), uint64_t{0x74f839c593dc67fd});
  CHECK_EQ(siphash(key, message, 15), uint64_t{0xa129ca6149be45e5});
  key[0] ^= 1;
  CHECK(siphash(key, message, 15) != 0xa129ca6149be45e5);
}

}  // namespace
}  // namespace ours::testing
