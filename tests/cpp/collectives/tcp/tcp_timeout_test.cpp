#include <atomic>
#include <thread>

#include "support/groups.h"
#include "support/patience.h"
#include "support/tcp_puppet.h"

// Calls over TCP that have run out of time name the absent ranks.

namespace ours {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::call_of;
using testing::join_others;
using testing::loopback_config;
using testing::make_meshes;
using testing::MapKeys;
using testing::Meshes;
using testing::Puppet;
using testing::run_ranks;
using testing::with_growing_timeouts;

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

TEST(a_rank_that_waits_for_another_is_not_taken_for_absent) {
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

/// Keys of a store whose process is stopped once all ranks have joined, so that it answers no request.
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
  // No two of the three ranks have met.
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
  CHECK(Clock::now() - start < seconds(10));
}

}  // namespace
}  // namespace ours
