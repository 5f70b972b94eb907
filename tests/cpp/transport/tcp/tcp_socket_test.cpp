#include "transport/tcp/tcp_socket.h"

#include <sys/socket.h>
#include <unistd.h>

#include <vector>

#include "common/deadline.h"
#include "support/lost_packets.h"
#include "support/ranks.h"

namespace ours::testing {
namespace {

struct Connection {
  Connection() {
    const ProcessFd listener = listen_at(*SocketAddress::parse("127.0.0.1"), {}, "");
    one = begin_connecting(local_address(listener.get()));
    CHECK(one.valid());
    wait_until([&] { return (other = accept_from(listener.get())).valid(); });
  }

  /// Sends as much as the system takes.
  void send_much() const {
    const std::vector<char> data(size_t{1} << 20);
    while (::send(one.get(), data.data(), data.size(), MSG_NOSIGNAL) > 0) {
    }
  }

  ProcessFd one, other;
};

constexpr std::chrono::milliseconds kLimit{100};

TEST(a_connection_whose_packets_are_lost_is_unanswered_until_they_arrive) {
  const Connection connection;
  CHECK(!is_unanswered(connection.one.get(), kLimit));
  lose_packets(connection.other.get());
  CHECK_EQ(::send(connection.one.get(), "x", 1, MSG_NOSIGNAL), 1);
  wait_until([&] { return is_unanswered(connection.one.get(), kLimit); });
  const int none = 0;
  CHECK_EQ(::setsockopt(connection.other.get(), SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof(none)), 0);
  wait_until([&] { return !is_unanswered(connection.one.get(), kLimit); });
}

TEST(a_peer_that_takes_nothing_does_answer) {
  const Connection connection;
  connection.send_much();
  const Deadline later = Deadline::after(3 * kLimit);
  wait_until([&] { return later.passed(); });
  CHECK(!is_unanswered(connection.one.get(), kLimit));
}

}  // namespace
}  // namespace ours::testing
