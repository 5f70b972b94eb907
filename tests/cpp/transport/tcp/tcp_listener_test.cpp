#include "transport/tcp/tcp_listener.h"

#include <dirent.h>

#include <cstdio>
#include <fstream>
#include <functional>
#include <future>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "support/tcp_ranks.h"
#include "transport/tcp/tcp_handshake.h"
#include "transport/tcp/tcp_socket.h"

// What the groups of a process share: where their peers connect to.

namespace ours::testing {
namespace {

using std::chrono::seconds;

size_t open_descriptors() {
  size_t count = 0;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

/// The connections that wait at the port of a mesh to be accepted.
uint64_t open_connections_to(const TcpMesh& mesh) {
  std::ifstream table("/proc/net/tcp");
  char ending[8];
  std::snprintf(ending, sizeof(ending), ":%04X", mesh.card().addresses[0].port());
  uint64_t count = 0;
  for (std::string line; std::getline(table, line);) {
    std::istringstream words(line);
    std::string number, local, remote, state;
    words >> number >> local >> remote >> state;
    const bool here = local.size() > 5 && local.compare(local.size() - 5, 5, ending) == 0;
    if (here && state == "01") ++count;
  }
  return count;
}

/// Moves both ends of a handshake until it is over, or `end` does.
void move(
    TcpHandshake& handshake, const std::function<void()>& other_end,
    const std::function<bool()>& end = [] { return false; }) {
  const Deadline patience = Deadline::after(seconds(10));
  while (handshake.advance() == TcpHandshake::State::Going && !end() && !patience.passed()) other_end();
  CHECK(!patience.passed());
}

TEST(groups_of_a_process_share_a_port_and_are_told_apart) {
  const auto first = make_meshes(2);
  const auto second = make_meshes(2);
  CHECK_EQ(first[0]->card().addresses[0].text(), second[1]->card().addresses[0].text());
  run_ranks(2, [&](int rank) {
    TcpGroup one(first[static_cast<size_t>(rank)]), other(second[static_cast<size_t>(rank)]);
    for (uint64_t seq = 0; seq < 3; ++seq) {
      for (TcpGroup* const group : {&one, &other}) {
        std::vector<float> data(10, static_cast<float>(rank + 1));
        sum(*group, seq, data, seconds(20));
        CHECK_EQ(data[9], 3.0f);
      }
    }
  });
}

TEST(a_mesh_takes_no_descriptors_before_it_is_used) {
  const auto first = make_meshes(2);
  const size_t before = open_descriptors();
  std::vector<Meshes> more;
  for (int i = 0; i < 20; ++i) more.push_back(make_meshes(2));
  CHECK_EQ(open_descriptors(), before);
}

TEST(a_rank_that_has_left_is_missed_although_its_process_still_listens) {
  // As if they were of different processes: rank 1 has a listener of its own, which only its own meshes serve.
  TcpConfig other_process = loopback_config();
  other_process.master = "elsewhere";
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = join_mesh(0, 2, keys);
  const auto left = join_mesh(1, 2, keys, other_process);
  const auto idle = make_meshes(2, other_process);
  TcpGroup group(mesh);
  std::vector<float> data(10, 1.0f);
  auto leaving = std::async(std::launch::async, [&] {
    const Deadline patience = Deadline::after(seconds(10));
    while (open_connections_to(*left) == 0 && !patience.passed()) std::this_thread::yield();
    left->leave();
  });
  const auto began = Clock::now();
  CHECK_CONTAINS(CHECK_THROWS(PeerError, sum(group, 0, data, seconds(20))), "left the group or died");
  CHECK(Clock::now() - began < seconds(10));
  leaving.get();
  CHECK_EQ(idle[0]->failure().message(), std::string());
}

TEST(a_peer_that_comes_before_the_secret_waits_for_it) {
  const auto listener = TcpListener::of(loopback_config(), "");
  int woken = 0;
  const auto place = listener->open([&] { ++woken; });
  const TcpSelf self{0, 2, 2, "host", 1, draw_nonce()};
  const TcpSelf peer{1, 2, 2, "host", 1, self.secret};
  TcpHandshake handshake(begin_connecting(listener->addresses()[0]), peer, 0, place->number, 0);
  int looks = 0;
  const auto serve = [&] {
    CHECK_EQ(listener->serve(), 0);
    ++looks;
  };
  move(handshake, serve, [&] { return looks > 1000; });
  CHECK_EQ(woken, 0);
  CHECK(listener->is_busy());
  listener->admit(*place, self);
  serve();
  CHECK_EQ(woken, 1);
  auto arrived = listener->take_arrived(*place);
  CHECK_EQ(arrived.size(), size_t{1});
  CHECK_EQ(arrived[0].peer(), 1);
  arrived[0].answer(Verdict::Welcome);
  move(handshake, [&] { arrived[0].advance(); });
  CHECK(handshake.advance() == TcpHandshake::State::Done);
  listener->close(place);
}

TEST(one_that_asks_for_a_mesh_that_is_not_there_is_left_without_a_word) {
  const auto listener = TcpListener::of(loopback_config(), "");
  const TcpSelf peer{1, 2, 2, "host", 1, draw_nonce()};
  TcpHandshake handshake(begin_connecting(listener->addresses()[0]), peer, 0, 4711, 0);
  move(handshake, [&] { listener->serve(); });
  CHECK(handshake.refused());
  CHECK_CONTAINS(handshake.reason(), "nobody of the group");
}

TEST(a_peer_that_gave_up_before_it_was_answered_may_come_again) {
  const auto others = make_meshes(2);
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = join_mesh(0, 2, keys);
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
  const TcpSelf peer{1, 2, terms.plan.streams + 1, "host", 1, terms.secret};
  const auto connect = [&] {
    return TcpHandshake(begin_connecting(mesh->card().addresses[0]), peer, 0, mesh->card().mesh, 0);
  };
  {
    // Another mesh takes it in, and its own looks only after the peer has gone.
    TcpHandshake first = connect();
    int looks = 0;
    const auto look = [&] {
      others[0]->look();
      ++looks;
    };
    move(first, look, [&] { return looks > 1000; });
  }
  TcpHandshake second = connect();
  move(second, [&] { mesh->look(); });
  CHECK(second.advance() == TcpHandshake::State::Done);
  mesh->look();
  CHECK_EQ(mesh->failure().message(), std::string());
}

TEST(a_stranger_that_makes_way_is_not_told_that_its_group_is_not_here) {
  const auto listener = TcpListener::of(loopback_config(), "");
  const TcpSelf peer{1, 2, 2, "host", 1, draw_nonce()};
  TcpHandshake handshake(begin_connecting(listener->addresses()[0]), peer, 0, 4711, 0);
  const Deadline patience = Deadline::after(seconds(10));
  bool sent_away = false;
  while (!sent_away && !patience.passed()) {
    listener->serve();
    sent_away = listener->send_stranger_away();
  }
  CHECK(sent_away);
  move(handshake, [&] { listener->serve(); });
  CHECK(handshake.advance() == TcpHandshake::State::Broken);
  CHECK(!handshake.refused());
}

TEST(a_listener_that_can_wake_no_more_meshes_gets_another_beside_it) {
  const auto listener = TcpListener::of(loopback_config(), "");
  std::vector<std::shared_ptr<TcpListener::Place>> places;
  while (TcpListener::of(loopback_config(), "") == listener) {
    places.push_back(listener->open([] {}));
    CHECK(places.size() < 500);
  }
  CHECK(places.size() > 300);
  for (const auto& place : places) listener->close(place);
}

}  // namespace
}  // namespace ours::testing
