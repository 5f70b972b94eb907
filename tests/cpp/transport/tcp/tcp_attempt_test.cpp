#include "transport/tcp/tcp_attempt.h"

#include "support/testing.h"

namespace ours::testing {
namespace {

TEST(addresses_are_tried_in_turn_from_any_of_them_on) {
  std::vector<SocketAddress> all;
  for (const char* text : {"10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"}) all.push_back(*SocketAddress::parse(text));
  for (size_t first = 0; first < all.size(); ++first) {
    TcpAttempt attempt(Clock::duration::zero(), first);
    for (int round = 0; round < 2; ++round) {
      CHECK_EQ(attempt.is_promising(), round == 0);
      std::string expected;
      for (size_t i = 0; i < all.size(); ++i) {
        const size_t address = (first + i) % all.size();
        CHECK_EQ(attempt.address(), address);
        expected += (i == 0 ? "" : ", ") + all[address].text() + " (no)";
        // In the second round all have refused.
        CHECK_EQ(attempt.try_next(all, "no", true), round == 1 && i + 1 == all.size());
      }
      CHECK_EQ(attempt.tried(), expected);
    }
  }
}

TEST(a_peer_is_not_gone_while_one_of_its_addresses_does_not_refuse) {
  std::vector<SocketAddress> all;
  for (const char* text : {"10.0.0.1:1", "10.0.0.2:1"}) all.push_back(*SocketAddress::parse(text));
  TcpAttempt attempt(Clock::duration::zero(), 1);
  for (int i = 0; i < 6; ++i) CHECK(!attempt.try_next(all, "no", i % 2 == 0));
}

}  // namespace
}  // namespace ours::testing
