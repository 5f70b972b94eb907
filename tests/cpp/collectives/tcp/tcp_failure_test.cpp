#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "collectives/tcp/tcp_messages.h"
#include "common/interval.h"
#include "support/lost_packets.h"
#include "support/message_ranks.h"
#include "support/patience.h"
#include "support/tcp_puppet.h"

// Ranks of groups over TCP die, leave, are late, or send noise.

namespace ours::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Returns the nanoseconds from a death until the last peer has heard of it.
int64_t death_of_a_peer(bool abruptly) {
  const auto keys = std::make_shared<MapKeys>();
  Puppet puppet(4, keys);
  const auto meshes = join_others(4, keys);
  std::atomic<int64_t> died{0};
  std::array<int64_t, 4> noticed{};
  run_ranks(4, [&](int rank) {
    if (rank == 0) {
      for (int other : {1, 2, 3}) puppet.connect(other);
      died = steady_ns();
      puppet.die(abruptly);
      return;
    }
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    std::vector<float> data(1 << 20, 1.0f);
    const std::string message = CHECK_THROWS(PeerError, sum(group, 3, data));
    noticed[static_cast<size_t>(rank)] = steady_ns();
    CHECK_CONTAINS(message, "rank 0 (host puppet, pid 4711) died");
    CHECK_CONTAINS(message, "all_reduce number 3");
    CHECK_EQ(CHECK_THROWS(PeerError, barrier(group, 4)), message);
  });
  return *std::max_element(noticed.begin(), noticed.end()) - died;
}

TEST(a_peer_that_dies_is_named_at_once_on_all_ranks) {
  for (const bool abruptly : {false, true}) {
    check_soon(seconds(1), [abruptly] { return death_of_a_peer(abruptly); });
  }
}

/// Of those for data, to rank 0.
void lose_second_stream(TcpMesh& mesh) {
  const TcpMesh::Lock lock = mesh.lock();
  lose_packets(mesh.endpoint().connections().data(0, 1).fd());
}

TEST(a_link_that_is_lost_to_data_is_noticed_while_that_for_control_lives) {
  TcpConfig config = loopback_config();
  config.unanswered = milliseconds(300);
  config.plan.streams = 2;
  const Meshes meshes = make_meshes(2, config);
  run_ranks(2, [&](int rank) {
    const auto& mesh = meshes[static_cast<size_t>(rank)];
    TcpGroup group(mesh);
    std::vector<float> data(8 << 20, 1.0f);  // the system does not buffer what rank 0 sends
    sum(group, 0, data);
    if (rank == 1) lose_second_stream(*mesh);
    const std::string message = CHECK_THROWS(PeerError, sum(group, 1, data));
    CHECK_CONTAINS(message, "has not answered for 300 ms on a connection; is one of the links down?");
    CHECK_CONTAINS(message, "all_reduce number 1");
  });
}

TEST(a_link_that_is_lost_is_noticed_although_its_peer_has_left) {
  TcpConfig config = loopback_config();
  config.unanswered = milliseconds(300);
  config.plan.streams = 2;
  const Meshes meshes = make_meshes(2, config);
  std::atomic<bool> lost{false};
  run_ranks(2, [&](int rank) {
    const auto& mesh = meshes[static_cast<size_t>(rank)];
    TcpGroup group(mesh);
    std::vector<float> data(2 * config.plan.chunk_bytes / sizeof(float), 1.0f);  // half of it on each stream
    std::vector<float> other = data;
    const std::vector<Span> outputs =
        rank == 0 ? std::vector{span(data), span(other)} : std::vector{span(other), span(data)};
    const auto gather = [&](uint64_t seq) {
      group.all_gather(call_of(Op::AllGather, DType::Float32, seq), const_span(data), outputs);
    };
    gather(0);
    barrier(group, 1);  // rank 0 has received all
    if (rank == 1) {
      lose_second_stream(*mesh);
      lost = true;
      const std::string message = CHECK_THROWS(PeerError, gather(2));
      CHECK_CONTAINS(message, "has not answered for 300 ms on a connection; is one of the links down?");
      return;
    }
    wait_until([&] { return lost.load(); });
    try {
      gather(2);
    } catch (const PeerError&) {
      return;  // the system did not buffer what was sent
    }
    mesh->leave();
  });
}

TEST(a_death_far_away_reaches_ranks_that_never_spoke_with_the_dead) {
  const auto keys = std::make_shared<MapKeys>();
  Puppet puppet(8, keys);
  const auto meshes = join_others(8, keys);
  run_ranks(8, [&](int rank) {
    if (rank == 0) {
      puppet.connect(1);
      puppet.die(true);
      return;
    }
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    const auto start = Clock::now();
    CHECK_CONTAINS(CHECK_THROWS(PeerError, barrier(group, 0)), "rank 0");
    CHECK(Clock::now() - start < seconds(5));
  });
}

TEST(a_rank_that_leaves_while_its_failure_is_recorded_still_tells_it) {
  const auto meshes = make_meshes(2);
  // The listener runs between the record of the failure and all that follows it.
  const_cast<GroupFailure&>(meshes[0]->failure()).set_listener([&](FailureKind, const std::string&) {
    meshes[0]->leave();
  });
  run_ranks(2, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    std::vector<float> data(1000, 1.0f);
    sum(group, 0, data);
    if (rank == 0) {
      meshes[0]->fail(FailureKind::Aborted, "enough");
    } else {
      CHECK_CONTAINS(CHECK_THROWS(AbortedError, sum(group, 1, data)), "enough");
    }
  });
}

TEST(random_bytes_on_a_connection_fail_the_group_and_nothing_else) {
  std::mt19937 random(11);
  std::atomic<int> understood{0};
  for (int round = 0; round < 60; ++round) {
    const auto keys = std::make_shared<MapKeys>();
    Puppet puppet(2, keys);
    TcpGroup group(join_others(2, keys)[1]);
    run_ranks(2, [&](int rank) {
      if (rank == 1) {
        std::vector<float> data(64);
        // Whatever came, this ends in time and with one of our errors.
        const std::string message = CHECK_THROWS(Error, sum(group, 0, data, milliseconds(100)));
        understood += message.find("makes no sense") != std::string::npos ? 1 : 0;
        return;
      }
      try {
        puppet.connect(1);
      } catch (const Failure&) {
        return;  // the machine is busy, and the other end had given up
      }
      std::vector<std::byte> noise(random() % 2000 + 200);
      for (auto& byte : noise) byte = static_cast<std::byte>(random());
      if (round % 2 == 0) {
        FrameHeader header;
        header.kind = static_cast<FrameKind>(random() % 8);
        header.call = random() % 3;
        header.part = static_cast<uint32_t>(random());
        header.total = round % 4 == 0 ? ~uint64_t{0} >> (random() % 64) : 256;
        header.bytes = round % 8 < 4 ? header.total : ~uint64_t{0} >> (random() % 64);
        std::memcpy(noise.data(), &header, sizeof(header));
      }
      // The end of a frame may be missing.
      puppet.send(round % 3 == 0 ? 0 : 1, noise.data(), noise.size() - random() % 150);
    });
  }
  CHECK(understood > 20);
}

TEST(a_silent_peer_is_named_at_the_deadline) {
  with_growing_timeouts([](milliseconds timeout) {
    const auto keys = std::make_shared<MapKeys>();
    Puppet puppet(3, keys);
    const auto meshes = join_others(3, keys);
    run_ranks(3, [&](int rank) {
      if (rank == 0) {
        puppet.connect(1);
        puppet.connect(2);
        return;
      }
      TcpGroup group(meshes[static_cast<size_t>(rank)]);
      std::vector<float> data(1 << 16, 1.0f);
      const auto start = Clock::now();
      const std::string message = CHECK_THROWS(TimeoutError, sum(group, 0, data, timeout));
      CHECK_CONTAINS(message, "for rank 0 (host puppet, pid 4711)");
      CHECK(message.find("rank 2 (") == std::string::npos || message.find("rank 1 (") == std::string::npos);
      CHECK(Clock::now() - start < timeout + seconds(2));
    });
  });
}

/// The error of rank 2 in an all_gather for which rank 1 has come, while rank 0 is connected and says nothing.
template <class ErrorType>
std::string gathered_without_rank_0(milliseconds timeout, bool breaks_a_connection) {
  const auto keys = std::make_shared<MapKeys>();
  Puppet puppet(3, keys);
  const auto meshes = join_others(3, keys);
  std::string answer;
  run_ranks(3, [&](int rank) {
    if (rank == 0) {
      puppet.connect(2);
      puppet.connect(1);
      if (breaks_a_connection) ::shutdown(puppet.fd(1), SHUT_RDWR);
      return;
    }
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    const std::vector<float> mine(10, 1.0f);
    std::vector<std::vector<float>> all(3, mine);
    const auto gather = [&] {
      group.all_gather(call_of(Op::AllGather, DType::Float32, 0, rank == 1 ? milliseconds(seconds(60)) : timeout),
                       const_span(mine), {span(all[0]), span(all[1]), span(all[2])});
    };
    const std::string message = CHECK_THROWS(ErrorType, gather());
    if (rank == 2) answer = message;
  });
  return answer;
}

TEST(a_silent_peer_is_named_by_a_rank_that_awaits_only_its_header) {
  with_growing_timeouts([](milliseconds timeout) {
    CHECK_CONTAINS(gathered_without_rank_0<TimeoutError>(timeout, false), "for rank 0 (host puppet, pid 4711)");
  });
}

TEST(a_broken_connection_is_noticed_by_a_rank_that_awaits_only_a_header) {
  CHECK_CONTAINS(gathered_without_rank_0<PeerError>(seconds(20), true),
                 "rank 0 (host puppet, pid 4711) broke a connection");
}

TEST(a_broken_connection_is_noticed_by_a_receive_whose_message_has_not_begun) {
  for (const int source : {0, kAnySource}) {
    const auto keys = std::make_shared<MapKeys>();
    Puppet puppet(2, keys);
    Port port(make_tcp_point_to_point(join_others(2, keys)[1], nullptr));
    run_ranks(2, [&](int rank) {
      if (rank == 0) {
        puppet.connect(1);
        ::shutdown(puppet.fd(1), SHUT_RDWR);
        return;
      }
      std::vector<int> data(4);
      const auto limit = std::make_shared<TransferLimit>(seconds(20));
      const auto transfer = port.p2p->recv(span(data), DType::Int32, source, 0, limit, nullptr);
      CHECK_CONTAINS(CHECK_THROWS(PeerError, port.wait(transfer)), "rank 0 (host puppet, pid 4711) broke a connection");
    });
  }
}

TEST(a_silent_peer_is_named_by_a_rank_that_only_has_to_tell_it_something) {
  const auto meshes = make_meshes(2);
  TcpCall::Facts facts{{}, 0, Deadline::after(milliseconds(100)), [] { return std::string("a call"); }, nullptr};
  TcpCall call(*meshes[0], facts);
  call.agree(0, 1);
  CHECK_CONTAINS(CHECK_THROWS(TimeoutError, call.run([] { return true; })), " for rank 1");
}

TEST(a_rank_that_never_came_is_named) {
  TcpGroup group(join_mesh(0, 3, std::make_shared<MapKeys>()));
  const std::string message = CHECK_THROWS(TimeoutError, barrier(group, 0, milliseconds(100)));
  CHECK_CONTAINS(message, "barrier number 0");
  CHECK_CONTAINS(message, "which has not published its address");
}

TEST(a_rank_that_waits_for_an_address_can_be_aborted) {
  TcpGroup group(join_mesh(0, 2, std::make_shared<MapKeys>()));
  std::atomic<bool> began{false};
  run_ranks(2, [&](int thread) {
    if (thread == 0) {
      began = true;
      CHECK_THROWS(AbortedError, barrier(group, 0));
    } else {
      wait_until([&] { return began.load(); });
      group.abort("enough");
    }
  });
}

/// Keys of a store whose process is stopped once all ranks have joined, so that it answers no request.
class SilentKeys final : public KeyValues {
 public:
  void set(const std::string& key, const std::string& value) override { keys_.set(key, value); }
  std::string get(const std::string& key, Deadline deadline) override {
    if (silent_) throw Failure("somebody waits for the store without end");
    return keys_.get(key, deadline);
  }
  std::string await(const std::string& key, Deadline deadline, const std::function<void()>& look_around) override {
    while (silent_) {
      look_around();
      if (deadline.passed()) throw TimeoutError("no answer");
      std::this_thread::sleep_for(milliseconds(1));
    }
    return keys_.get(key, deadline);
  }
  void fall_silent() { silent_ = true; }

 private:
  MapKeys keys_;
  std::atomic<bool> silent_{false};
};

TEST(a_store_that_does_not_answer_delays_no_timeout_and_an_absent_rank_is_named_all_the_same) {
  const auto keys = std::make_shared<SilentKeys>();
  Meshes meshes;
  for (int r = 0; r < 2; ++r) {
    meshes.push_back(join_mesh(r, 3, keys));
    meshes.back()->introduce({"(host a, pid 1)", "(host b, pid 2)", "(host c, pid 3)"});
  }
  // No two of the three ranks have met.
  keys->fall_silent();
  const auto start = Clock::now();
  run_ranks(2, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    std::vector<float> data(1, 1.0f);
    const std::string text = CHECK_THROWS(TimeoutError, sum(group, 0, data, milliseconds(300)));
    CHECK_CONTAINS(text, rank == 0 ? "for rank 1 (host b, pid 2)" : "for rank 2 (host c, pid 3)");
  });
  CHECK(Clock::now() - start < seconds(10));
}

}  // namespace
}  // namespace ours::testing
