#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "common/interval.h"
#include "support/groups.h"
#include "support/patience.h"
#include "support/tcp_puppet.h"

// Ranks of groups over TCP die, abort, leave, or send noise.

namespace ours {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::call_of;
using testing::join_others;
using testing::make_meshes;
using testing::MapKeys;
using testing::Puppet;
using testing::run_ranks;

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
    CHECK(Clock::now() - start < seconds(5));
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

TEST(a_rank_that_leaves_while_its_failure_is_recorded_still_tells_it) {
  const auto meshes = make_meshes(2);
  // The listener runs between the record of the failure and all that follows it.
  const_cast<GroupFailure&>(meshes[0]->failure()).set_listener([&](FailureKind, const std::string&) {
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

}  // namespace
}  // namespace ours
