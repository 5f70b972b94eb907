#include <atomic>
#include <thread>

#include "support/device_ranks.h"
#include "support/patience.h"

// The errors that ranks of groups over device memory get when a device fails, or makes no progress.

namespace ours {
namespace {

using std::chrono::milliseconds;
using testing::call_of;
using testing::DeviceRank;
using testing::ipc_maker;
using testing::make_nccl;
using testing::MakeOnDevice;
using testing::run_on_devices;
using testing::staging_maker;
using testing::StandInOptions;
using testing::sum;

StandInOptions one_queue(int) {
  // All streams of a rank's device wait for each other.
  StandInOptions options;
  options.one_queue = true;
  return options;
}

/// A test that runs on both kinds of groups, with more than one chunk in a call.
void on_both(const std::function<void(const MakeOnDevice& make)>& test) {
  for (const MakeOnDevice& make : {ipc_maker(4096), staging_maker(4096)}) test(make);
}

TEST(a_device_that_fails_is_heard_of_by_all_ranks) {
  on_both([](const MakeOnDevice& make) {
    std::atomic<int> reduced{0};
    run_on_devices(3, one_queue, make, [&](DeviceRank& rank) {
      std::vector<float> data(5000, 1.0f);
      const auto stream = rank.device->make_stream();
      sum(*rank.group, 0, data);
      ++reduced;
      while (reduced < 3 && rank.group->failure().empty()) std::this_thread::yield();
      if (rank.number() == 1) rank.device->fail("Xid 79: it has fallen off the bus");
      const std::string message = CHECK_THROWS(Error, sum(*rank.group, 1, data));
      CHECK_CONTAINS(message, "it has fallen off the bus");
      CHECK_EQ(CHECK_THROWS(Error, rank.group->barrier(call_of(Op::Barrier, DType::UInt8, 2))), message);
      CHECK_EQ(rank.group->failure(), message);
      // The group does not wait for long for what has been queued, which uses the data.
      if (rank.number() != 1) rank.device->synchronize(stream->handle());
    });
  });
}

TEST(nobody_waits_for_memory_that_the_device_frees) {
  const auto device = testing::make_device("busy");
  const auto idle = std::make_shared<testing::StandInPoint>();
  device->before("free", [idle] { idle->wait(); });
  const auto began = Clock::now();
  device->memory(100).reset();
  CHECK(Clock::now() - began < std::chrono::seconds(20));
  idle->reach();
}

TEST(a_call_that_a_device_refuses_fails_the_group) {
  // What a device cannot take is no mistake of the caller's that peers could ignore.
  const std::pair<MakeOnDevice, std::string> refused[] = {
      {ipc_maker(4096), "copy"}, {staging_maker(4096), "copy"}, {make_nccl, "reduce"}};
  for (const auto& [make, what] : refused) {
    for (const bool misuse : {false, true}) {
      run_on_devices(2, one_queue, make, [&, what = what](DeviceRank& rank) {
        const auto refuse = [misuse] {
          if (misuse) throw InvalidArgument("the address is crooked");
          throw DeviceError("out of memory");
        };
        if (rank.number() == 1) rank.device->before(what, refuse);
        int32_t x = 1;
        const Reduction average{ReduceKind::Avg, 2, 1.0};  // with NCCL, a kernel of the device divides the sum
        const auto call = call_of(Op::AllReduce, DType::Int32, 0);
        const auto calls = [&] {
          rank.group->all_reduce(call, &x, &x, 1, average);
          // A rank that NCCL gave the sum before the failure was found hears of it next.
          rank.group->barrier(call_of(Op::Barrier, DType::UInt8, 1));
        };
        const std::string message = CHECK_THROWS(Error, calls());
        // What the device was given before may still use x.
        const auto stream = rank.device->make_stream();
        rank.device->synchronize(stream->handle());
        CHECK_CONTAINS(message, misuse ? "all_reduce on rank 1: " : "out of memory");
        if (misuse) CHECK_CONTAINS(message, "the address is crooked");
        CHECK_EQ(rank.group->failure(), message);
      });
    }
  }
}

TEST(a_device_that_does_not_get_on_is_named_after_the_timeout) {
  const auto run = [](const MakeOnDevice& make, milliseconds patience) {
    run_on_devices(2, one_queue, make, [&](DeviceRank& rank) {
      std::vector<float> data(5000, 1.0f);
      sum(*rank.group, 0, data);
      const auto stream = rank.device->make_stream();
      std::shared_ptr<testing::StandInPoint> stopped;
      if (rank.number() == 1) stopped = rank.device->stop(stream->handle());
      // Rank 0 waits longer, and hears of rank 1's timeout.
      const milliseconds timeout = rank.number() == 1 ? patience : milliseconds(20000);
      const std::string message = CHECK_THROWS(TimeoutError, sum(*rank.group, 3, data, timeout));
      // The work that is held may still be done, in memory that stays.
      rank.group.reset();
      if (stopped) stopped->reach();
      rank.device->synchronize(stream->handle());
      CHECK_CONTAINS(message, "of all_reduce number 3 (SUM, 5000 x float32) on rank 1 ");
      CHECK_CONTAINS(message, std::to_string(patience.count()) + " ms");
    });
  };
  on_both([&](const MakeOnDevice& make) {
    testing::with_growing_timeouts([&](milliseconds patience) { run(make, patience); });
  });
}

TEST(a_group_can_be_left_while_an_operation_is_under_way) {
  on_both([](const MakeOnDevice& make) {
    std::atomic<bool> reduced{false}, ended{false};
    run_on_devices(2, one_queue, make, [&](DeviceRank& rank) {
      std::vector<float> data(5000, 1.0f);
      if (rank.number() == 1) {
        sum(*rank.group, 0, data);
        reduced = true;
        while (!ended && rank.group->failure().empty()) std::this_thread::yield();
        return rank.group->leave();
      }
      sum(*rank.group, 0, data);
      while (!reduced && rank.group->failure().empty())
        std::this_thread::yield();  // otherwise it may hear of the abort in its operation
      const auto stream = rank.device->make_stream();
      const auto stopped = rank.device->stop(stream->handle());
      std::thread leaver([&] {
        rank.group->leave();
        rank.group->abort("it was destroyed");
      });
      CHECK_THROWS(Error, sum(*rank.group, 1, data));
      ended = true;
      leaver.join();
      stopped->reach();
      rank.device->synchronize(stream->handle());
      CHECK_THROWS(Error, sum(*rank.group, 2, data));
    });
  });
}

}  // namespace
}  // namespace ours
