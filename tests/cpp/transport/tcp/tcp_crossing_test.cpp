#include <memory>
#include <thread>
#include <vector>

#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"

// Two ranks that connect to each other at the same time.

namespace ours::testing {
namespace {

using std::chrono::seconds;

ProcessFd accept_soon(const ProcessFd& listener) {
  ProcessFd fd = accept_from(listener.get());
  for (const Deadline patience = Deadline::after(seconds(10)); !fd.valid() && !patience.passed();) {
    std::this_thread::yield();
    fd = accept_from(listener.get());
  }
  CHECK(fd.valid());
  return fd;
}

/// Goes on with a handshake while `going()`, at most for 10 seconds.
template <class Going>
void advance(TcpHandshake& handshake, Going going) {
  for (const Deadline patience = Deadline::after(seconds(10)); going() && !patience.passed();) {
    handshake.advance();
    std::this_thread::yield();
  }
  CHECK(!going());
}

TEST(a_rank_that_has_said_hello_insists_on_its_connection_in_every_round) {
  const auto keys = std::make_shared<MapKeys>();
  ProcessFd listener = listen_at(*SocketAddress::parse("127.0.0.1"), PortRange{});
  TcpCard card;
  card.machine = machine_id();
  card.addresses = {local_address(listener.get())};
  keys->set(card_key(1), card.text());
  const auto mesh = join_mesh(0, 2, keys);
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
  const TcpSelf peer{1, 2, terms.plan.streams + 1, "host", 1, terms.secret};
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      TcpGroup group(mesh);
      std::vector<float> data(1);
      CHECK_CONTAINS(CHECK_THROWS(PeerError, sum(group, 0, data, seconds(30))), "rank 1");
      return;
    }
    accept_soon(listener).reset();  // in vain, which ends the first round
    TcpHandshake theirs(accept_soon(listener));
    advance(theirs, [&] { return !theirs.awaits_mesh(); });
    theirs.meet(peer);
    CHECK(theirs.awaits_verdict());
    TcpHandshake own(begin_connecting(mesh->card().addresses[0]), peer, 0, mesh->card().mesh, 0);
    advance(own, [&] { return own.reason().empty() && own.advance() != TcpHandshake::State::Done; });
    CHECK_EQ(own.reason(), "it insists on its own connection");
    listener.reset();  // rank 1 is gone
  });
}

}  // namespace
}  // namespace ours::testing
