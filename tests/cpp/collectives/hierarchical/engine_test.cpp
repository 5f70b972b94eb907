#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "common/interval.h"
#include "support/engine_ranks.h"
#include "support/groups.h"
#include "support/patience.h"
#include "support/tcp_puppet.h"

// Groups whose payloads an engine carries. The contract of groups runs over them as well (support/groups.h); here is
// the rest.

namespace ours::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(an_engine_carries_what_is_long_enough) {
  for (const bool polls : {false, true}) {
    const auto meshes = make_meshes(3);
    const auto board = connect_engines(meshes, polls, kLeastEngineBytes);
    run_ranks(3, [&](int rank) {
      TcpGroup group(meshes[static_cast<size_t>(rank)]);
      std::vector<float> few(10, 1.0f), many(700001, 1.0f);
      sum(group, 0, few);
      barrier(group, 1);
      CHECK_EQ(board->arrived(), size_t{0});
      barrier(group, 2);
      sum(group, 3, many);
      for (const float x : many) CHECK_EQ(x, 3.0f);
    });
    CHECK(board->arrived() > 0);
  }
}

TEST(an_engine_that_fails_is_named_on_all_ranks) {
  for (const bool polls : {false, true}) {
    const auto meshes = make_meshes(3);
    const auto board = connect_engines(meshes, polls);
    board->fail_after(4, 1);
    run_ranks(3, [&](int rank) {
      TcpGroup group(meshes[static_cast<size_t>(rank)]);
      std::vector<float> data(1 << 20, 1.0f);
      const auto start = Clock::now();
      const std::string message = CHECK_THROWS(Error, sum(group, 0, data));
      CHECK(Clock::now() - start < seconds(5));
      CHECK_CONTAINS(message, "the engine between nodes failed: switchboard cannot");
      CHECK_CONTAINS(message, "the cable was cut");
      CHECK_CONTAINS(message, "noticed by rank 1 (host ");
      CHECK_CONTAINS(message, "all_reduce number 0");
      CHECK_EQ(CHECK_THROWS(Error, sum(group, 0, data)), message);
    });
    CHECK_EQ(board->under_way(), size_t{0});
  }
}

/// Checked by AddressSanitizer: an engine's transfers touch their memory when they end.
TEST(memory_of_a_call_that_fails_is_there_until_the_engine_lets_go) {
  for (const GroupKind& kind : group_kinds()) {
    if (kind.name.find("engine") == std::string::npos) continue;
    std::atomic<int> ended{0};
    run_groups(kind, 4, 4096, [&](Group& group) {
      // Rank 3 does not come.
      if (group.rank() == 3) return wait_until([&] { return ended == 3; });
      const std::vector<float> in(20000, 1.0f);
      std::vector<float> out(in.size());
      const Call call = call_of(Op::ReduceScatter, DType::Float32, 0, milliseconds(300));
      CHECK_THROWS(Error,
                   group.reduce_scatter(call, std::vector<const void*>(4, in.data()), std::vector<size_t>(4, in.size()),
                                        out.data(), Reduction{ReduceKind::PremulSum, 4, 0.5}));
      ++ended;
    });
  }
}

TEST(a_peer_that_leaves_what_it_has_begun_is_named) {
  const auto meshes = make_meshes(2);
  const auto board = connect_engines(meshes, false);
  board->hold();
  run_ranks(2, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    std::vector<float> data(1 << 18, 1.0f);
    if (rank == 1) {
      // Leaves while the other waits for its data, whose headers came through.
      std::thread leaver([&] {
        wait_until([&] { return board->under_way() >= 4; });
        meshes[1]->leave();
      });
      CHECK_THROWS(Error, sum(group, 0, data));
      leaver.join();
      return;
    }
    const std::string message = CHECK_THROWS(PeerError, sum(group, 0, data));
    CHECK_CONTAINS(message, "rank 1 (host ");
    CHECK_CONTAINS(message, "left the group");
  });
  CHECK_EQ(board->under_way(), size_t{0});
}

TEST(an_abort_ends_transfers_within_100_ms) {
  const auto abort_one = [](bool polls) {
    const auto meshes = make_meshes(2);
    const auto board = connect_engines(meshes, polls);
    board->hold();
    std::atomic<int64_t> aborted{0};
    std::array<int64_t, 2> freed{};
    run_ranks(3, [&](int rank) {
      if (rank == 2) {
        wait_until([&] { return board->under_way() >= 4; });
        aborted = steady_ns();
        meshes[0]->fail(FailureKind::Aborted, "enough");
        return;
      }
      TcpGroup group(meshes[static_cast<size_t>(rank)]);
      std::vector<float> data(1 << 18, 1.0f);
      CHECK_CONTAINS(CHECK_THROWS(AbortedError, sum(group, 0, data)), "enough");
      freed.at(static_cast<size_t>(rank)) = steady_ns();
    });
    CHECK_EQ(board->under_way(), size_t{0});
    return std::max(freed[0], freed[1]) - aborted.load();
  };
  for (const bool polls : {false, true}) {
    check_soon(milliseconds(100), [&] { return abort_one(polls); });
  }
}

TEST(an_engine_that_moves_nothing_ends_at_the_deadline) {
  const auto meshes = make_meshes(2);
  const auto board = connect_engines(meshes, true);
  board->hold();
  run_ranks(2, [&](int rank) {
    TcpGroup group(meshes[static_cast<size_t>(rank)]);
    std::vector<float> data(1 << 18, 1.0f);
    const std::string message = CHECK_THROWS(TimeoutError, sum(group, 0, data, milliseconds(200)));
    CHECK_CONTAINS(message, "Timed out waiting 200ms");
  });
  CHECK_EQ(board->under_way(), size_t{0});
}

TcpCall::Facts facts_of_test() {
  return {Signature{}, 0, Deadline::after(seconds(20)), [] { return std::string("a test"); },
          [](int, const Signature&) { return std::string("not the same"); }};
}

TEST(a_peer_that_leaves_after_its_last_header_is_named) {
  constexpr size_t kBytes = 8192;
  const auto meshes = make_meshes(2);
  const auto board = connect_engines(meshes, false);
  board->hold();
  run_ranks(2, [&](int rank) {
    std::vector<std::byte> data(kBytes);
    Tally tally;
    TcpMesh& mesh = *meshes[static_cast<size_t>(rank)];
    if (rank == 1) {
      TcpCall call(mesh, facts_of_test());
      call.send({0, 0, kBytes}, data.data(), tally);
      // Both ends have begun: the header is with rank 0, whose connections have nothing left to wait for.
      call.run([&] { return board->under_way() == 2; });
      call.without_lock([&] { mesh.leave(); });
      return;
    }
    const std::string message = CHECK_THROWS(PeerError, {
      TcpCall call(mesh, facts_of_test());
      call.receive({1, 0, kBytes}, data.data(), tally);
      call.run([&] { return tally.complete(); });
    });
    CHECK_CONTAINS(message, "rank 1 (host ");
    CHECK_CONTAINS(message, "left the group");
  });
  CHECK_EQ(board->under_way(), size_t{0});
}

/// Rank 1 waits for one message; rank 0, a puppet, sends its header as `change` leaves it. Returns rank 1's error.
std::string receive_from_puppet(bool has_engine, const std::function<void(FrameHeader&)>& change) {
  constexpr size_t kBytes = 8192;
  FrameHeader right;
  right.call = 1;
  right.total = right.bytes = kBytes;
  const auto keys = std::make_shared<MapKeys>();
  Puppet puppet(2, keys);
  const auto mesh = join_others(2, keys).back();
  if (has_engine) mesh->set_engine(make_engine(1, std::make_shared<Switchboard>(true)));
  std::string message;
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      puppet.connect(1);
      FrameHeader header = right;
      change(header);
      puppet.send(1, &header, sizeof(header));
      return;
    }
    std::vector<std::byte> data(kBytes, std::byte{5});
    Tally tally;
    message = CHECK_THROWS(Error, {
      TcpCall call(*mesh, facts_of_test());
      call.receive({0, 0, kBytes}, data.data(), tally);
      call.run([&] { return tally.complete(); });
    });
    CHECK_EQ(tally.done, size_t{0});
    for (const std::byte byte : data) CHECK(byte == std::byte{5});
  });
  return message;
}

TEST(headers_that_do_not_suit_the_engine_are_refused) {
  const auto carried = [](FrameHeader& header) { header.engine_number = 1; };
  CHECK_CONTAINS(receive_from_puppet(false, carried), "an engine that this rank does not use");
  CHECK_CONTAINS(receive_from_puppet(true, [](FrameHeader&) {}), "should come by the engine between nodes does not");
  CHECK_CONTAINS(receive_from_puppet(true, [](FrameHeader& header) { header.engine_number = 2; }),
                 "not numbered in turn");
  CHECK_CONTAINS(receive_from_puppet(true,
                                     [](FrameHeader& header) {
                                       header.engine_number = 1;
                                       header.bytes = 8191;
                                     }),
                 "is not the one that follows");
  FrameHeader control;
  control.kind = FrameKind::Bye;
  CHECK(fault_of(control, false) == nullptr);
  control.engine_number = 1;
  CHECK(fault_of(control, false) != nullptr);
}

TEST(a_peer_that_dies_while_an_engine_has_its_data_is_named) {
  const auto keys = std::make_shared<MapKeys>();
  Puppet puppet(2, keys);
  const auto mesh = join_others(2, keys).back();
  const auto board = std::make_shared<Switchboard>(false);
  mesh->set_engine(make_engine(1, board));
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      puppet.connect(1);
      wait_until([&] { return board->under_way() > 0; });
      puppet.die(false);
      return;
    }
    TcpGroup group(mesh);
    std::vector<float> data(1 << 20, 1.0f);
    const auto start = Clock::now();
    CHECK_CONTAINS(CHECK_THROWS(PeerError, sum(group, 0, data)), "rank 0 (host puppet, pid 4711) died");
    CHECK(Clock::now() - start < seconds(5));
  });
  CHECK_EQ(board->under_way(), size_t{0});
}

}  // namespace
}  // namespace ours::testing
