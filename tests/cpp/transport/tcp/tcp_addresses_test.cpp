#include "transport/tcp/tcp_addresses.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

TcpAddresses addresses(const std::vector<std::string>& all, size_t paths, const std::string& machine = "here") {
  TcpCard card;
  card.machine = machine;
  card.paths = paths;
  for (const std::string& one : all) card.addresses.push_back(*SocketAddress::parse(one));
  TcpAddresses made;
  made.take(card, "here");
  return made;
}

std::string hosts(const TcpAddresses& all) {
  std::string text;
  for (const SocketAddress& one : all.all()) text += one.host() + ' ';
  return text;
}

TEST(loopback_comes_last_and_only_on_one_machine) {
  CHECK_EQ(hosts(addresses({"127.0.0.1", "10.0.0.1"}, 1)), std::string("10.0.0.1 127.0.0.1 "));
  CHECK_EQ(hosts(addresses({"127.0.0.1", "10.0.0.1"}, 1, "there")), std::string("10.0.0.1 "));
}

TEST(data_streams_and_ranks_take_the_paths_in_turn) {
  const TcpAddresses two = addresses({"10.0.0.1", "10.0.1.1", "fd00::1"}, 2);
  CHECK_EQ(two.first(0, 1), 0U);  // control
  CHECK_EQ(two.first(1, 0), 0U);
  CHECK_EQ(two.first(2, 0), 1U);
  CHECK_EQ(two.first(3, 0), 0U);
  CHECK_EQ(two.first(1, 1), 1U);
  CHECK_EQ(addresses({"10.0.0.1", "10.0.1.1"}, 1).first(2, 1), 0U);
  CHECK_EQ(addresses({"127.0.0.1", "10.0.1.1"}, 2, "there").first(2, 0), 0U);
}

}  // namespace
}  // namespace ours::testing
