#include "transport/tcp/tcp_addresses.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

TcpCard card_of(const std::vector<std::string>& all, size_t paths, const std::string& machine = "here") {
  TcpCard card;
  card.machine = machine;
  card.paths = paths;
  for (const std::string& one : all) card.addresses.push_back(*SocketAddress::parse(one));
  return card;
}

std::string hosts(const TcpAddresses& all) {
  std::string text;
  for (const SocketAddress& one : all.all()) text += one.host() + ' ';
  return text;
}

const TcpCard kOwn = card_of({"10.0.0.9", "10.0.1.9"}, 2);

TEST(loopback_comes_last_and_only_on_one_machine) {
  const std::vector<std::string> both{"127.0.0.1", "10.0.0.1"};
  CHECK_EQ(hosts(TcpAddresses(card_of(both, 1), kOwn)), std::string("10.0.0.1 127.0.0.1 "));
  CHECK_EQ(hosts(TcpAddresses(card_of(both, 1, "there"), kOwn)), std::string("10.0.0.1 "));
}

TEST(data_streams_and_ranks_take_the_paths_in_turn) {
  const TcpAddresses two(card_of({"10.0.0.1", "10.0.1.1", "fd00::1"}, 2), kOwn);
  CHECK_EQ(two.first(0, 1), 0U);  // control
  CHECK_EQ(two.first(1, 0), 0U);
  CHECK_EQ(two.first(2, 0), 1U);
  CHECK_EQ(two.first(3, 0), 0U);
  CHECK_EQ(two.first(1, 1), 1U);
}

TEST(paths_are_those_that_both_ranks_have) {
  const std::vector<std::string> all{"10.0.0.1", "10.0.1.1"};
  const auto second = [](const TcpCard& card, const TcpCard& own) { return TcpAddresses(card, own).first(2, 0); };
  CHECK_EQ(second(card_of(all, 2), kOwn), 1U);
  CHECK_EQ(second(card_of(all, 1), kOwn), 0U);
  CHECK_EQ(second(card_of(all, 2), card_of({"10.0.0.9"}, 1)), 0U);
  // Loopback is none, and what moves to its place is none either.
  CHECK_EQ(second(card_of({"127.0.0.1", "10.0.0.1", "::1", "fd00::1"}, 2), kOwn), 0U);
  CHECK_EQ(second(card_of({"127.0.0.1", "::1"}, 2), kOwn), 0U);
}

}  // namespace
}  // namespace ours::testing
