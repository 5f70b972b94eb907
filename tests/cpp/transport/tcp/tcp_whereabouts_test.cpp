#include "transport/tcp/tcp_whereabouts.h"

#include <sys/socket.h>

#include "common/whereabouts.h"
#include "support/children.h"
#include "support/tcp_ranks.h"
#include "support/testing.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"

namespace ours::testing {
namespace {

AskedPeer self() { return own_tcp_whereabouts({*SocketAddress::parse("127.0.0.1")}, PortRange{}); }

TEST(a_process_is_asked_over_the_network_where_it_is) {
  const AskedPeer asked = self();
  CHECK_EQ(asked.addresses.size(), 1u);
  CHECK(self().addresses == asked.addresses && self().key == asked.key);
  const auto texts = ask_tcp_whereabouts({asked, {}, asked});
  CHECK_EQ(texts[0], own_place());
  CHECK_EQ(texts[1], "cannot be asked where it is");
  CHECK_EQ(texts[2], own_place());
}

#ifndef __SANITIZE_THREAD__  // it takes the child's thread for that of its parent at the same address, and ends it
TEST(a_process_can_be_forked_while_another_thread_opens_its_sockets) {
  CHECK(can_fork_during([] { return !self().addresses.empty(); }));
}
#endif

TEST(strangers_and_nonsense_get_no_answer) {
  AskedPeer asked = self();
  // A packet of the right length among them.
  for (const size_t bytes : {0, 1, 40, 48, 2000}) {
    const ProcessFd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    const std::string packet(bytes, '\1');
    CHECK_EQ(::sendto(fd.get(), packet.data(), bytes, 0, asked.addresses[0].data(), asked.addresses[0].size()),
             static_cast<ssize_t>(bytes));
  }
  CHECK_EQ(ask_tcp_whereabouts({asked})[0], own_place());
  asked.key = draw_nonce();
  CHECK_CONTAINS(ask_tcp_whereabouts({asked})[0], "did not say within 300 ms");
}

TEST(a_port_at_which_nobody_answers_is_not_waited_for_longer) {
  const ProcessFd silent = receive_at(*SocketAddress::parse("127.0.0.1"), PortRange{});
  const auto began = Clock::now();
  CHECK_CONTAINS(ask_tcp_whereabouts({{draw_nonce(), {local_address(silent.get())}}})[0], "did not say within 300 ms");
  CHECK(Clock::now() - began >= kAskingTime);
}

}  // namespace
}  // namespace ours::testing
