#include <sys/socket.h>

#include <random>
#include <vector>

#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"

// Peers, strangers, and strangers that pretend to be peers connect to a rank.

namespace ours::testing {
namespace {

using std::chrono::seconds;

/// A connection of a stranger.
ProcessFd intrude(const std::shared_ptr<TcpMesh>& mesh) { return begin_connecting(mesh->card().addresses[0]); }

TEST(strangers_and_port_scans_do_no_harm) {
  const auto meshes = make_meshes(3);
  std::mt19937 random(5);
  std::vector<ProcessFd> strangers;
  for (int i = 0; i < 100; ++i) {
    ProcessFd fd = intrude(meshes[static_cast<size_t>(i % 3)]);
    std::vector<uint32_t> noise(random() % 300);
    for (auto& word : noise) word = static_cast<uint32_t>(random());
    [[maybe_unused]] const ssize_t sent = ::send(fd.get(), noise.data(), noise.size() * 4, MSG_NOSIGNAL);
    // A third of them stay and say nothing more, a third end, and a third disappear at once.
    if (i % 3 == 1) ::shutdown(fd.get(), SHUT_WR);
    if (i % 3 != 2) strangers.push_back(std::move(fd));
  }
  run_ranks(3, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    for (uint64_t seq = 0; seq < 3; ++seq) {
      std::vector<float> data(10000, 1.0f);
      sum(group, seq, data, seconds(20));
      CHECK_EQ(data[9999], 3.0f);
    }
  });
}

TEST(peers_that_come_all_at_a_time_are_all_let_in) {
  constexpr int kRanks = 101;
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = join_mesh(0, kRanks, keys);
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
  std::vector<TcpSelf> peers;
  for (int r = 1; r < kRanks; ++r) peers.push_back({r, kRanks, terms.plan.streams + 1, "host", 1, terms.secret});
  std::vector<TcpHandshake> handshakes;
  for (const TcpSelf& peer : peers) {
    for (int stream = 0; stream < peer.streams; ++stream) {
      handshakes.emplace_back(intrude(mesh), peer, 0, mesh->card().mesh, stream);
    }
  }
  const auto patience = Deadline::after(seconds(20));
  bool going = true;
  while (going && !patience.passed()) {
    mesh->look();
    going = false;
    for (TcpHandshake& handshake : handshakes) {
      const auto state = handshake.advance();
      if (state == TcpHandshake::State::Broken) throw Failure("a peer was refused: " + handshake.reason());
      going = going || state == TcpHandshake::State::Going;
    }
  }
  CHECK(!going);
}

TEST(strangers_that_say_nothing_make_way_for_peers) {
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = join_mesh(0, 2, keys);
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
  std::vector<ProcessFd> strangers;
  for (int i = 0; i < 150; ++i) strangers.push_back(intrude(mesh));
  const TcpSelf peer{1, 2, terms.plan.streams + 1, "host", 1, terms.secret};
  TcpHandshake handshake(intrude(mesh), peer, 0, mesh->card().mesh, 0);
  // Sooner than strangers are sent away just for their silence.
  const auto patience = Deadline::after(seconds(8));
  while (handshake.advance() == TcpHandshake::State::Going && !patience.passed()) mesh->look();
  CHECK(handshake.advance() == TcpHandshake::State::Done);
}

TEST(a_peer_that_does_not_know_the_secret_or_means_another_rank_is_refused) {
  const auto keys = std::make_shared<MapKeys>();
  const auto meshes = make_meshes(3, loopback_config(), keys);
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
  const auto knock = [&](TcpSelf self, int to, int stream) {
    TcpHandshake handshake(intrude(meshes[1]), self, to, meshes[1]->card().mesh, stream);
    const auto patience = Deadline::after(seconds(10));
    while (handshake.advance() == TcpHandshake::State::Going && !patience.passed()) meshes[1]->look();
    return handshake.advance();
  };
  TcpSelf self{0, 3, terms.plan.streams + 1, "host", 1, terms.secret};
  TcpSelf old_attempt = self;
  old_attempt.secret[3] ^= 1;
  CHECK(knock(old_attempt, 1, 0) == TcpHandshake::State::Broken);
  CHECK(knock(self, 2, 0) == TcpHandshake::State::Broken);
  CHECK(knock(self, 1, 9) == TcpHandshake::State::Broken);
  TcpSelf outside = self;
  outside.rank = 3;
  CHECK(knock(outside, 1, 0) == TcpHandshake::State::Broken);
  CHECK(knock(self, 1, 0) == TcpHandshake::State::Done);
  CHECK_EQ(meshes[1]->failure().message(), std::string());
}

}  // namespace
}  // namespace ours::testing
