#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "common/interval.h"
#include "support/groups.h"
#include "support/patience.h"
#include "support/tcp_puppet.h"

// What becomes of groups over TCP when peers die, fall silent, or are no peers at all.

namespace ours {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::call_of;
using testing::loopback_config;
using testing::make_meshes;
using testing::MapKeys;
using testing::Meshes;
using testing::message_of;
using testing::Puppet;
using testing::run_ranks;
using testing::with_growing_timeouts;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

/// Ranks 1 to n - 1 of a group whose rank 0 is a puppet.
std::vector<std::shared_ptr<TcpMesh>> join_others(int n, const std::shared_ptr<MapKeys>& keys) {
  std::vector<std::shared_ptr<TcpMesh>> meshes(1);
  for (int r = 1; r < n; ++r) {
    meshes.push_back(TcpMesh::join(r, n, keys, loopback_config(), Deadline::after(seconds(10))));
  }
  return meshes;
}

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
    const std::string message =
        CHECK_THROWS(PeerError, group.all_reduce(call_of(Op::AllReduce, DType::Float32, 3), data.data(), data.data(),
                                                 data.size(), Reduction{ReduceKind::Sum, 4, 1.0}));
    noticed[static_cast<size_t>(rank)] = steady_ns();
    CHECK_CONTAINS(message, "rank 0 (host puppet, pid 4711) died");
    CHECK_CONTAINS(message, "all_reduce number 3");
    CHECK_EQ(CHECK_THROWS(PeerError, group.barrier(call_of(Op::Barrier, DType::UInt8, 4))), message);
  });
  return *std::max_element(noticed.begin(), noticed.end()) - died;
}

TEST(a_peer_that_dies_is_named_at_once_on_all_ranks) {
  for (const bool abruptly : {false, true}) {
    testing::check_soon(seconds(1), [abruptly] { return death_of_a_peer(abruptly); });
  }
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
    CHECK_CONTAINS(CHECK_THROWS(PeerError, group.barrier(call_of(Op::Barrier, DType::UInt8, 0))), "rank 0");
    CHECK(seconds_since(start) < 5);
  });
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
      const std::string message =
          CHECK_THROWS(TimeoutError, group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0, timeout), data.data(),
                                                      data.data(), data.size(), Reduction{ReduceKind::Sum, 3, 1.0}));
      CHECK_CONTAINS(message, "for rank 0 (host puppet, pid 4711)");
      CHECK(message.find("rank 2 (") == std::string::npos || message.find("rank 1 (") == std::string::npos);
      CHECK(Clock::now() - start < timeout + seconds(2));
    });
  });
}

TEST(a_rank_that_never_came_is_named) {
  const auto keys = std::make_shared<MapKeys>();
  TcpGroup group(TcpMesh::join(0, 3, keys, loopback_config(), Deadline::after(seconds(10))));
  const std::string message =
      CHECK_THROWS(TimeoutError, group.barrier(call_of(Op::Barrier, DType::UInt8, 0, milliseconds(100))));
  CHECK_CONTAINS(message, "barrier number 0");
  CHECK_CONTAINS(message, "for rank 1, which has not published its address");
}

TEST(a_rank_that_waits_for_an_address_can_be_aborted) {
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = TcpMesh::join(0, 2, keys, loopback_config(), Deadline::after(seconds(10)));
  TcpGroup group(mesh);
  std::atomic<bool> began{false};
  run_ranks(2, [&](int thread) {
    if (thread == 0) {
      began = true;
      CHECK_THROWS(AbortedError, group.barrier(call_of(Op::Barrier, DType::UInt8, 0)));
    } else {
      while (!began) std::this_thread::yield();
      group.abort("enough");
    }
  });
}

TEST(who_waits_for_somebody_else_is_not_taken_for_absent) {
  with_growing_timeouts([](milliseconds timeout) {
    const auto meshes = make_meshes(7);
    run_ranks(7, [&](int rank) {
      TcpGroup group(meshes[static_cast<size_t>(rank)]);
      if (rank == 3) {
        while (group.failure().empty()) std::this_thread::yield();
      }
      const std::string message =
          CHECK_THROWS(TimeoutError, group.barrier(call_of(Op::Barrier, DType::UInt8, 0, timeout)));
      CHECK_CONTAINS(message, " for rank 3 (host ");
      CHECK(message.find("), rank") == std::string::npos);
    });
  });
}

/// Returns the nanoseconds from an abort until the waiter has heard of it.
int64_t abort_from_another_thread() {
  const auto meshes = make_meshes(2);
  std::atomic<bool> waits{false};
  std::atomic<int64_t> aborted{0}, freed{0};
  TcpGroup other(meshes[1]);
  run_ranks(2, [&](int rank) {
    if (rank == 1) {
      while (!waits) std::this_thread::yield();
      // Awake at first, asleep later: both have to be woken.
      std::this_thread::sleep_for(milliseconds(30));
      aborted = steady_ns();
      meshes[0]->fail(FailureKind::Aborted, "enough");
      return;
    }
    TcpGroup group(meshes[0]);
    waits = true;
    CHECK_THROWS(AbortedError, group.barrier(call_of(Op::Barrier, DType::UInt8, 0)));
    freed = steady_ns();
  });
  return freed.load() - aborted.load();
}

TEST(an_abort_from_another_thread_frees_the_waiter_within_100_ms) {
  testing::check_soon(milliseconds(100), abort_from_another_thread);
}

/// A connection of somebody who knows nothing.
ProcessFd intrude(const std::shared_ptr<TcpMesh>& mesh) { return begin_connecting(mesh->card().addresses[0]); }

TEST(a_rank_that_leaves_while_its_failure_is_recorded_still_tells_it) {
  const auto meshes = make_meshes(2);
  // Between the record and all that follows it.
  const_cast<TcpFailure&>(meshes[0]->failure()).set_listener([&](FailureKind, const std::string&) {
    meshes[0]->leave();
  });
  run_ranks(2, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    std::vector<float> data(1000, 1.0f);
    const auto reduce = [&](uint64_t seq) {
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), data.data(), data.data(), data.size(),
                       Reduction{ReduceKind::Sum, 2, 1.0});
    };
    reduce(0);
    if (rank == 0) {
      meshes[0]->fail(FailureKind::Aborted, "enough");
    } else {
      CHECK_CONTAINS(CHECK_THROWS(AbortedError, reduce(1)), "enough");
    }
  });
}

TEST(strangers_and_port_scans_do_no_harm) {
  const auto meshes = make_meshes(3);
  std::mt19937 random(5);
  std::vector<ProcessFd> strangers;
  for (int i = 0; i < 100; ++i) {
    ProcessFd fd = intrude(meshes[static_cast<size_t>(i % 3)]);
    std::vector<uint32_t> noise(random() % 300);
    for (auto& word : noise) word = static_cast<uint32_t>(random());
    [[maybe_unused]] const ssize_t sent = ::send(fd.get(), noise.data(), noise.size() * 4, MSG_NOSIGNAL);
    // A third stays and says nothing more, a third ends, a third is gone at once.
    if (i % 3 == 1) ::shutdown(fd.get(), SHUT_WR);
    if (i % 3 != 2) strangers.push_back(std::move(fd));
  }
  run_ranks(3, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    for (uint64_t seq = 0; seq < 3; ++seq) {
      std::vector<float> data(10000, 1.0f);
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq, seconds(20)), data.data(), data.data(), data.size(),
                       Reduction{ReduceKind::Sum, 3, 1.0});
      CHECK_EQ(data[9999], 3.0f);
    }
  });
}

TEST(peers_that_come_all_at_a_time_are_all_let_in) {
  constexpr int kRanks = 101;
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = TcpMesh::join(0, kRanks, keys, loopback_config(), Deadline::after(seconds(10)));
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
  std::vector<TcpSelf> peers;
  for (int r = 1; r < kRanks; ++r) peers.push_back({r, kRanks, terms.plan.streams + 1, "host", 1, terms.secret});
  std::vector<TcpHandshake> handshakes;
  for (const TcpSelf& peer : peers) {
    for (int stream = 0; stream < peer.streams; ++stream) handshakes.emplace_back(intrude(mesh), peer, 0, stream);
  }
  const auto patience = Deadline::after(seconds(20));
  bool going = true;
  while (going && !patience.passed()) {
    mesh->look();
    going = false;
    for (TcpHandshake& handshake : handshakes) {
      const auto state = handshake.advance();
      if (state == TcpHandshake::State::Broken) throw testing::Failure("a peer was refused: " + handshake.reason());
      going = going || state == TcpHandshake::State::Going;
    }
  }
  CHECK(!going);
}

TEST(strangers_who_say_nothing_make_way_for_peers) {
  const auto keys = std::make_shared<MapKeys>();
  const auto mesh = TcpMesh::join(0, 2, keys, loopback_config(), Deadline::after(seconds(10)));
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
  std::vector<ProcessFd> strangers;
  for (int i = 0; i < 150; ++i) strangers.push_back(intrude(mesh));
  const TcpSelf peer{1, 2, terms.plan.streams + 1, "host", 1, terms.secret};
  TcpHandshake handshake(intrude(mesh), peer, 0, 0);
  // Sooner than strangers are sent away for their silence alone.
  const auto patience = Deadline::after(seconds(8));
  while (handshake.advance() == TcpHandshake::State::Going && !patience.passed()) mesh->look();
  CHECK(handshake.advance() == TcpHandshake::State::Done);
}

/// Keys that answer nobody, once all have joined: those of a store whose process is stopped.
class SilentKeys final : public KeyValues {
 public:
  void set(const std::string& key, const std::string& value) override { keys_.set(key, value); }
  std::string get(const std::string& key, Deadline deadline) override {
    if (silent_) throw testing::Failure("somebody waits for the store without end");
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
    meshes.push_back(TcpMesh::join(r, 3, keys, loopback_config(), Deadline::after(seconds(10))));
    meshes.back()->introduce({"(host a, pid 1)", "(host b, pid 2)", "(host c, pid 3)"});
  }
  // Neither these two nor the third have met.
  keys->fall_silent();
  const auto start = Clock::now();
  run_ranks(2, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    const auto reduce = [&] {
      float value = 1;
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0, milliseconds(300)), &value, &value, 1,
                       Reduction{ReduceKind::Sum, 3, 1.0});
    };
    const std::string text = CHECK_THROWS(TimeoutError, reduce());
    CHECK_CONTAINS(text, rank == 0 ? "for rank 1 (host b, pid 2)" : "for rank 2 (host c, pid 3)");
  });
  CHECK(seconds_since(start) < 10);
}

TEST(who_does_not_know_the_secret_or_means_another_rank_is_refused) {
  const auto keys = std::make_shared<MapKeys>();
  const auto meshes = make_meshes(3, loopback_config(), keys);
  const TcpTerms terms = TcpTerms::parse(keys->get(kTermsKey, Deadline::after(seconds(1))));
  const auto knock = [&](TcpSelf self, int to, int stream) {
    TcpHandshake handshake(intrude(meshes[1]), self, to, stream);
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

TEST(random_bytes_on_a_connection_fail_the_group_and_nothing_else) {
  std::mt19937 random(11);
  std::atomic<int> understood{0};
  for (int round = 0; round < 60; ++round) {
    const auto keys = std::make_shared<MapKeys>();
    Puppet puppet(2, keys);
    TcpGroup group(join_others(2, keys)[1]);
    run_ranks(2, [&](int rank) {
      if (rank == 1) {
        float data[64] = {};
        // Whatever came, this ends in time and with one of our errors.
        const std::string message =
            CHECK_THROWS(Error, group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0, milliseconds(100)), data,
                                                 data, 64, Reduction{ReduceKind::Sum, 2, 1.0}));
        understood += message.find("makes no sense") != std::string::npos ? 1 : 0;
        return;
      }
      try {
        puppet.connect(1);
      } catch (const testing::Failure&) {
        return;  // the other end had given up: a busy machine
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

TEST(headers_from_the_wire_are_checked) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    FrameHeader header;
    header.kind = static_cast<FrameKind>(random() % 10);
    header.bytes = random() >> (random() % 64);
    header.total = random() >> (random() % 64);
    const bool data = i % 2 == 0;
    if (fault_of(header, data) != nullptr) continue;
    CHECK_EQ(data, header.kind == FrameKind::Data);
    CHECK(data ? header.bytes <= header.total : header.bytes <= kMaxFailureBytes);
  }
  FrameHeader foreign;
  foreign.magic = __builtin_bswap32(kTcpMagic);
  CHECK(fault_of(foreign, true) != nullptr);
}

TEST(what_lies_in_the_store_is_checked) {
  TcpCard card;
  card.host = "node1";
  card.pid = 17;
  card.machine = "abc";
  card.addresses = {*SocketAddress::parse("10.0.0.1:80"), *SocketAddress::parse("[fd00::1]:81")};
  CHECK_EQ(TcpCard::parse(card.text()).text(), card.text());
  TcpTerms terms;
  terms.secret = draw_nonce();
  terms.plan.streams = 3;
  CHECK(TcpTerms::parse(terms.text()).secret == terms.secret);
  CHECK_EQ(TcpTerms::parse(terms.text()).plan.streams, 3);
  CHECK_EQ(TcpTerms::parse(terms.text()).plan.rules, std::string());
  terms.plan.rules = "all nodes>=2 bytes<=64K ring;reduce whole";
  CHECK_EQ(TcpTerms::parse(terms.text()).plan.rules, terms.plan.rules);
  std::mt19937 random(9);
  for (const std::string& good : {card.text(), terms.text()}) {
    for (int i = 0; i < 500; ++i) {
      std::string bad = good.substr(0, random() % good.size());
      if (!bad.empty()) bad[random() % bad.size()] = static_cast<char>(random());
      try {
        (void)TcpCard::parse(bad);
        (void)TcpTerms::parse(bad);
      } catch (const Error&) {
        continue;  // what it should say
      }
    }
  }
  CHECK_THROWS(Error, TcpCard::parse(""));
  CHECK_THROWS(Error, TcpCard::parse("ours-tcp1 1 m host"));
  CHECK_THROWS(Error, TcpCard::parse(card.text() + std::string(1 << 20, ' ')));
  CHECK_THROWS(Error, TcpTerms::parse("ours-tcp1 00 1 4096 1024 16"));
}

}  // namespace
}  // namespace ours
