#include <future>
#include <memory>
#include <string>
#include <vector>

#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"

// Two ranks that connect to each other at the same time.

namespace ours::testing {
namespace {

using std::chrono::seconds;

/// A mesh of two ranks, of which a test plays rank 1.
struct Crossing {
  std::shared_ptr<MapKeys> keys = std::make_shared<MapKeys>();
  std::shared_ptr<TcpMesh> mesh = join_mesh(0, 2, keys);
  ProcessFd listener = listen_at(*SocketAddress::parse("127.0.0.1"), PortRange{});
  TcpSelf self;

  Crossing() {
    TcpCard card = mesh->card();
    card.addresses = {local_address(listener.get())};
    keys->set(card_key(1), card.text());
    const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
    self = {1, 2, terms.plan.streams + 1, "host", 1, terms.secret};
  }

  /// The next connection of rank 0.
  ProcessFd accept() const {
    ProcessFd fd;
    wait_until([&] { return (fd = accept_from(listener.get())).valid(); });
    return fd;
  }

  /// Connects to rank 0, and returns why that was in vain.
  std::string connect() const {
    TcpHandshake own(begin_connecting(mesh->card().addresses[0]), self, 0, mesh->card().mesh, 0);
    wait_until([&] { return own.advance() != TcpHandshake::State::Going; });
    CHECK(!own.refused());
    return own.reason();
  }
};

TEST(a_rank_that_insists_on_its_own_connection_says_so) {
  Crossing crossing;
  auto calling = std::async(std::launch::async, [&] {
    TcpGroup group(crossing.mesh);
    std::vector<float> data(10, 1.0f);
    CHECK_THROWS(AbortedError, sum(group, 0, data, seconds(20)));
  });
  const ProcessFd silent = crossing.accept();
  CHECK_EQ(crossing.connect(), "it insists on its own connection");
  crossing.mesh->fail(FailureKind::Aborted, "that is all");
  calling.get();
}

TEST(a_rank_that_has_said_hello_insists_on_its_connection_in_every_round) {
  Crossing crossing;
  auto calling = std::async(std::launch::async, [&] {
    TcpGroup group(crossing.mesh);
    std::vector<float> data(1);
    CHECK_CONTAINS(CHECK_THROWS(PeerError, sum(group, 0, data, seconds(30))), "rank 1");
  });
  crossing.accept().reset();  // in vain, which ends the first round
  {
    TcpHandshake theirs(crossing.accept());
    wait_until([&] {
      theirs.advance();
      return theirs.awaits_mesh();
    });
    theirs.meet(crossing.self);
    CHECK(theirs.awaits_verdict());
    CHECK_EQ(crossing.connect(), "it insists on its own connection");
  }
  crossing.listener.reset();  // rank 1 is gone
  calling.get();
}

}  // namespace
}  // namespace ours::testing
