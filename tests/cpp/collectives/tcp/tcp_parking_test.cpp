#include <algorithm>
#include <atomic>
#include <filesystem>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "collectives/tcp/tcp_messages.h"
#include "support/message_ranks.h"
#include "support/tcp_ranks.h"

// Groups over TCP close connections that nobody uses, and make them again.

namespace ours::testing {
namespace {

using Descriptors = std::set<std::pair<std::string, std::string>>;

/// The numbers of this process's open files, and what they are; without the one by which they are found.
Descriptors descriptors() {
  Descriptors found;
  for (const auto& one : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed_meanwhile;
    const std::string what = std::filesystem::read_symlink(one, closed_meanwhile);
    if (!closed_meanwhile && what.find("/fd") == std::string::npos) found.emplace(one.path().filename(), what);
  }
  return found;
}

/// How many there are that were not there before. Plain numbers would also differ when groups of earlier tests, which
/// have failed and tell their peers so for some seconds, close theirs.
size_t more_than(const Descriptors& before) {
  const Descriptors now = descriptors();
  return static_cast<size_t>(
      std::count_if(now.begin(), now.end(), [&](const auto& one) { return before.count(one) == 0; }));
}

/// Ranks and their groups, which live for the whole test.
struct Ranks {
  explicit Ranks(int n, const TcpConfig& config = loopback_config()) : meshes(make_meshes(n, config)) {
    for (const auto& mesh : meshes) groups.push_back(std::make_unique<TcpGroup>(mesh));
  }

  void add_up(uint64_t seq, size_t count) {
    const int n = static_cast<int>(groups.size());
    run_ranks(n, [&](int rank) {
      std::vector<float> data(count, static_cast<float>(rank + 1));
      sum(*groups[static_cast<size_t>(rank)], seq, data);
      for (const float x : data) CHECK_EQ(x, static_cast<float>(n * (n + 1) / 2));
    });
  }

  size_t connections() const {
    size_t all = 0;
    for (const auto& mesh : meshes) all += mesh->connections();
    return all;
  }

  /// Lets all ranks offer and answer until there are no connections.
  void park_all() const {
    wait_until([this] {
      for (const auto& mesh : meshes) mesh->park();
      return connections() == 0;
    });
  }

  Meshes meshes;
  std::vector<std::unique_ptr<TcpGroup>> groups;
};

TEST(connections_that_nobody_uses_are_closed_and_made_again) {
  for (const int streams : {1, 3}) {
    TcpConfig config = loopback_config();
    config.plan.streams = streams;
    Ranks ranks(3, config);
    const Descriptors before = descriptors();
    for (uint64_t seq = 0; seq < 6; seq += 2) {
      ranks.add_up(seq, 5000);
      ranks.add_up(seq + 1, 500'000);
      CHECK(ranks.connections() > 0);
      CHECK(more_than(before) > 0);
      ranks.park_all();
      // The meshes' own are closed, too.
      CHECK_EQ(more_than(before), size_t{0});
    }
  }
}

TEST(an_offer_does_not_disturb_a_call_that_begins) {
  Ranks ranks(2);
  ranks.add_up(0, 10);
  for (uint64_t seq = 1; seq < 20; ++seq) {
    // One rank offers, or both do before either has heard of it.
    CHECK(ranks.meshes[seq % 2]->park() > 0);
    if (seq % 3 == 0) ranks.meshes[1 - seq % 2]->park();
    ranks.add_up(seq, seq % 5 == 0 ? 500'000 : 10);
  }
}

TEST(what_has_not_been_received_yet_keeps_the_connection) {
  const Ranks ranks(2);
  const Meshes& meshes = ranks.meshes;
  Port sender(make_tcp_point_to_point(meshes[0], meshes[0]));
  Port receiver(make_tcp_point_to_point(meshes[1], meshes[1]));
  for (int round = 1; round < 5; ++round) {
    const std::vector<int> data = numbers(round, 1000);
    const auto sent = sender.send(data, 1);
    run_ranks(2, [&](int rank) {
      if (rank == 0) return sender.wait(sent);  // then it is in the system's hands
      wait_until([&] {
        meshes[1]->look();  // for the connection
        return sent->done();
      });
    });
    for (int i = 0; i < 10; ++i) {
      for (const auto& mesh : meshes) mesh->park();
    }
    CHECK_EQ(ranks.connections(), size_t{4});
    std::vector<int> received(data.size());
    receiver.wait(receiver.recv(received, 0));
    CHECK(received == data);
    ranks.park_all();
  }
}

/// Rank 0 has offered; `answered`: rank 1 has agreed, and rank 0 has not heard it.
void run_after_offer(bool answered, const std::function<void(Ranks&)>& body) {
  Ranks ranks(2);
  ranks.add_up(0, 10);
  CHECK(ranks.meshes[0]->park() > 0);
  // It closes its data connection when it agrees.
  if (answered) {
    wait_until([&] {
      ranks.meshes[1]->look();
      return ranks.meshes[1]->connections() < 2;
    });
  }
  body(ranks);
}

TEST(a_failure_is_heard_whatever_has_been_offered) {
  for (const bool answered : {false, true}) {
    for (const size_t failing : {0, 1}) {
      run_after_offer(answered, [failing](Ranks& ranks) {
        ranks.groups[failing]->abort("because");
        CHECK_CONTAINS(CHECK_THROWS(Error, barrier(*ranks.groups[1 - failing], 1)), "because");
      });
    }
  }
}

TEST(a_rank_that_leaves_is_missed_whatever_has_been_offered) {
  for (const bool answered : {false, true}) {
    for (const size_t leaving : {0, 1}) {
      run_after_offer(answered, [leaving](Ranks& ranks) {
        ranks.meshes[leaving]->leave();
        CHECK_CONTAINS(CHECK_THROWS(PeerError, barrier(*ranks.groups[1 - leaving], 1)), "left the group");
      });
    }
  }
}

TEST(a_refusal_is_heard_although_an_offer_was_made) {
  run_after_offer(false, [](Ranks& ranks) {
    ranks.groups[0]->refuse(call_of(Op::Barrier, DType::Opaque8, 1), "wrong argument");
    CHECK_CONTAINS(CHECK_THROWS(Error, barrier(*ranks.groups[1], 1)), "wrong argument");
  });
}

/// Offers at random moments while it lives.
class Parker {
 public:
  explicit Parker(const Meshes& meshes)
      : thread_([this, meshes] {
          for (std::minstd_rand random; !ends_.load(); std::this_thread::yield()) {
            const auto& mesh = meshes[random() % meshes.size()];
            if (random() % 2 == 0) mesh->park();
            mesh->idle_connections(random() % 2 == 0);
          }
        }) {}
  Parker(const Parker&) = delete;
  Parker& operator=(const Parker&) = delete;
  ~Parker() {
    ends_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> ends_{false};
  std::thread thread_;
};

TEST(calls_are_right_whenever_connections_are_closed) {
  Ranks ranks(3);
  const Parker parker(ranks.meshes);
  for (uint64_t seq = 0; seq < 60; ++seq) ranks.add_up(seq, seq % 7 == 0 ? 300'000 : 100);
}

TEST(an_offer_does_not_keep_back_the_verdict_of_a_monitored_barrier) {
  const Ranks ranks(2);
  for (uint64_t seq = 0; seq < 300; ++seq) {
    // The verdict is the last thing that rank 0 says, and nobody moves its connections afterwards.
    ranks.meshes[0]->park();
    run_ranks(2, [&](int rank) {
      const Call call = call_of(Op::Barrier, DType::Opaque8, seq, std::chrono::seconds(20));
      ranks.groups[static_cast<size_t>(rank)]->monitored_barrier(call, true);
    });
  }
}

TEST(messages_arrive_whenever_connections_are_closed) {
  const Meshes meshes = make_meshes(3);
  const Parker parker(meshes);
  run_ranks(3, [&](int rank) {
    const auto& mesh = meshes[static_cast<size_t>(rank)];
    Port port(make_tcp_point_to_point(mesh, mesh));
    for (int round = 0; round < 60; ++round) {
      const size_t count = round % 7 == 0 ? 100'000 : 10;
      const int next = (rank + 1) % 3, last = (rank + 2) % 3;
      const std::vector<int> data = numbers(rank + round, count);
      const auto sent = port.send(data, next);
      std::vector<int> received(count);
      port.wait(port.recv(received, round % 2 == 0 ? last : kAnySource));
      CHECK(received == numbers(last + round, count));
      port.wait(sent);
    }
  });
}

TEST(the_groups_that_were_not_used_for_longest_close_their_connections) {
  std::vector<std::unique_ptr<Ranks>> groups;
  for (uint64_t i = 0; i < 12; ++i) {
    groups.push_back(std::make_unique<Ranks>(2));
    groups.back()->add_up(0, 10);
  }
  // Two of two ranks keep theirs: four connections each, as both ends are in this process.
  groups[3]->add_up(1, 10);
  const auto all = [&] {
    size_t sum = 0;
    for (const auto& group : groups) sum += group->connections();
    return sum;
  };
  CHECK_EQ(all(), size_t{48});
  wait_until([&] {
    TcpIdle::see_to_others(8);
    return all() == 8;
  });
  CHECK_EQ(groups[3]->connections(), size_t{4});
  CHECK_EQ(groups[11]->connections(), size_t{4});
  for (int i = 0; i < 10; ++i) TcpIdle::see_to_others(8);
  CHECK_EQ(all(), size_t{8});
  for (const auto& group : groups) group->add_up(2, 10);
}

TEST(how_many_idle_connections_are_kept) {
  CHECK_EQ(idle_connections_to_keep(0, 1 << 20), size_t{4096});
  CHECK_EQ(idle_connections_to_keep(0, 1000), size_t{250});
  CHECK_EQ(idle_connections_to_keep(7, 1000), size_t{7});
}

}  // namespace
}  // namespace ours::testing
