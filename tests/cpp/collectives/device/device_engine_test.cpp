#include "collectives/device/device_engine.h"

#include "collectives/device/device_group.h"
#include "collectives/device/ipc_group.h"
#include "collectives/device/staging_group.h"
#include "device/deferred_release.h"
#include "support/device_ranks.h"

// All ranks must choose the same engine to move the data of devices.

namespace ours {
namespace {

using testing::call_of;

constexpr size_t kMemory = size_t{24} << 30;

/// Ranks on these devices, each of which reaches all others.
std::vector<DeviceFacts> facts_of(const std::vector<std::string>& devices, DeviceEngine wish = DeviceEngine::Auto) {
  std::vector<DeviceFacts> facts;
  for (const std::string& device : devices) {
    facts.push_back({device, device, kMemory, std::vector<bool>(devices.size(), true), "", wish, ""});
  }
  return facts;
}

DeviceEngine engine_of(int nodes, const std::vector<DeviceFacts>& facts) {
  return choose_device_engine(nodes, facts).engine;
}

TEST(device_engine_is_the_best_that_is_possible) {
  CHECK_EQ(engine_of(1, facts_of({"a", "b", "c"})), DeviceEngine::Nccl);
  CHECK_EQ(engine_of(3, facts_of({"a", "b", "c"})), DeviceEngine::Nccl);
  CHECK_EQ(engine_of(1, facts_of({"a", "b", "a"})), DeviceEngine::Ipc);
  CHECK_EQ(engine_of(1, facts_of({"a", "a", "a"})), DeviceEngine::Ipc);
  CHECK_EQ(engine_of(2, facts_of({"a", "b", "a"})), DeviceEngine::Staging);
  CHECK_EQ(engine_of(1, facts_of(std::vector<std::string>(65, "a"))), DeviceEngine::Staging);
  CHECK_EQ(engine_of(1, facts_of(std::vector<std::string>(64, "a"))), DeviceEngine::Ipc);

  std::vector<DeviceFacts> facts = facts_of({"a", "b", "c"});
  facts[1].why_no_vendor = "libnccl.so.2 was not found";
  CHECK_EQ(engine_of(1, facts), DeviceEngine::Ipc);
  CHECK_CONTAINS(choose_device_engine(1, facts).why, "on rank 1: libnccl.so.2 was not found");
  facts[2].reaches[0] = false;
  CHECK_EQ(engine_of(1, facts), DeviceEngine::Staging);
  CHECK_CONTAINS(choose_device_engine(1, facts).why, "the device of rank 2 cannot use the memory of that of rank 0");
  // If two ranks have the same device, it does not matter what they say of peers.
  facts[0].identity = facts[0].hardware = facts[2].identity;
  CHECK_EQ(engine_of(1, facts), DeviceEngine::Ipc);
}

TEST(device_engine_wishes_are_honoured_or_refused_with_the_reason) {
  for (const DeviceEngine wish : {DeviceEngine::Nccl, DeviceEngine::Ipc, DeviceEngine::Staging}) {
    CHECK_EQ(engine_of(1, facts_of({"a", "b"}, wish)), wish);
  }
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, engine_of(1, facts_of({"a", "a"}, DeviceEngine::Nccl))),
                 "OURS_DEVICE_ENGINE is 'nccl', which is not possible: rank 0 and rank 1 share a device");
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, engine_of(2, facts_of({"a", "b"}, DeviceEngine::Ipc))),
                 "the ranks are on 2 nodes");
  std::vector<DeviceFacts> facts = facts_of({"a", "b"});
  facts[1].wish = DeviceEngine::Staging;
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, engine_of(1, facts)), "'auto' on rank 0 and 'staging' on rank 1");
}

TEST(device_engine_of_parts_of_one_device_is_not_nccl) {
  std::vector<DeviceFacts> facts = facts_of({"part 1", "b", "part 2"});
  facts[0].hardware = facts[2].hardware = "a";
  CHECK_EQ(engine_of(1, facts), DeviceEngine::Ipc);
  facts[0].reaches[2] = facts[2].reaches[0] = false;
  CHECK_EQ(engine_of(1, facts), DeviceEngine::Staging);
  CHECK_CONTAINS(choose_device_engine(1, facts).why, "no NCCL: rank 0 and rank 2 have parts of one device");
  for (DeviceFacts& one : facts) one.wish = DeviceEngine::Nccl;
  CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, engine_of(1, facts)), "have parts of one device");
}

TEST(device_stages_are_larger_where_ranks_share_a_device_that_has_room) {
  const auto slot_of = [](const std::vector<DeviceFacts>& facts) {
    return IpcGroup::stage_bytes(facts) / IpcGroup::kSlots;
  };
  constexpr size_t kLeast = IpcGroup::kSlotBytes;
  CHECK_EQ(slot_of(facts_of({"a", "b", "c"})), kLeast);
  CHECK_EQ(slot_of(facts_of({"a", "a", "a", "a"})), kMemory / 64 / 4 / IpcGroup::kSlots);
  CHECK_EQ(slot_of(facts_of(std::vector<std::string>(20, "a"))), kLeast);
  CHECK_EQ(slot_of(facts_of({"a", "a", "b"})), kLeast);
  // All ranks' stages have the size of the smallest.
  std::vector<DeviceFacts> facts = facts_of({"a", "a", "b", "b"});
  for (DeviceFacts& one : facts) one.memory_bytes = size_t{140} << 30;
  CHECK_EQ(slot_of(facts), size_t{128} << 20);
  facts[2].memory_bytes = facts[3].memory_bytes = size_t{16} << 30;
  CHECK_EQ(slot_of(facts), (size_t{16} << 30) / 64 / 2 / IpcGroup::kSlots);
}

/// A library without devices; `why_no_vendor` may throw.
class Library final : public DeviceLibrary {
 public:
  explicit Library(std::function<std::string()> why_no_vendor = [] { return "there is none in tests"; })
      : why_no_vendor_(std::move(why_no_vendor)) {}
  std::string describe() const override { return "a library"; }
  std::vector<std::string> device_names() const override { return {}; }
  std::shared_ptr<Device> device(int) override { throw DeviceError("it has none"); }
  std::string why_no_vendor_group() const override { return why_no_vendor_(); }
  std::shared_ptr<Group> make_vendor_group(std::shared_ptr<Group>, std::shared_ptr<Device>, Deadline) override {
    throw DeviceError("two ranks use one device");
  }
  std::string vendor_version() const override { return ""; }

 private:
  const std::function<std::string()> why_no_vendor_;
};

/// Runs fn(make, host, device, rank) on ranks, where make(library) makes the group.
using Make = std::function<MadeDeviceGroup(Library&& library)>;
void run_making(int ranks, DeviceEngine wish, const std::function<testing::StandInOptions(int rank)>& devices,
                const std::function<void(const Make& make, Group& host, testing::StandInDevice& device)>& fn) {
  const auto hosts = testing::node_kind("", Setting::Auto).make(ranks, 4096);
  testing::run_ranks(ranks, [&](int rank) {
    const auto host = hosts[static_cast<size_t>(rank)]();
    const auto device = testing::StandInDevice::make(devices(rank));
    const auto make = [&](Library&& library) {
      return make_device_group(host, device, library, call_of(Op::AllReduce, DType::Float32, 0), wish);
    };
    fn(make, *host, *device);
  });
}

testing::StandInOptions shared_by_two(int rank) { return {rank < 2 ? "a" : "b"}; }

TEST(device_group_is_of_the_chosen_engine_on_all_ranks) {
  for (const DeviceEngine wish : {DeviceEngine::Auto, DeviceEngine::Staging, DeviceEngine::Nccl}) {
    run_making(3, wish, shared_by_two, [&](const Make& make, Group& host, auto&) {
      if (wish == DeviceEngine::Nccl) {
        CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, make(Library())), "there is none in tests");
        // The group lives on.
        host.barrier(call_of(Op::Barrier, DType::UInt8, 1));
        return;
      }
      const MadeDeviceGroup made = make(Library());
      CHECK_EQ(made.choice.engine, wish == DeviceEngine::Auto ? DeviceEngine::Ipc : DeviceEngine::Staging);
      CHECK_EQ(dynamic_cast<IpcGroup*>(made.group.get()) != nullptr, wish == DeviceEngine::Auto);
      float x = 1;
      made.group->all_reduce(call_of(Op::AllReduce, DType::Float32, 0), &x, &x, 1, Reduction{ReduceKind::Sum, 3, 1.0});
      CHECK_EQ(x, 3.0f);
    });
  }
}

TEST(device_group_of_parts_of_one_device_goes_through_the_host) {
  const auto part = [](int rank) {
    testing::StandInOptions options{"part " + std::to_string(rank), false};
    options.hardware = "a";
    return options;
  };
  run_making(2, DeviceEngine::Auto, part, [](const Make& make, Group&, auto&) {
    CHECK_EQ(make(Library([] { return ""; })).choice.engine, DeviceEngine::Staging);
  });
}

TEST(device_group_goes_through_the_host_where_a_rank_cannot_share_its_memory_or_map_its_peers) {
  release_deferred();  // what earlier tests have left
  const size_t kept_before = count_deferred();
  const std::string calls[] = {"memory", "map"};
  for (const DeviceEngine wish : {DeviceEngine::Auto, DeviceEngine::Ipc}) {
    for (const std::string& call : calls) {
      run_making(
          3, wish, [](int) { return testing::StandInOptions{"a"}; },
          [&](const Make& make, Group& host, testing::StandInDevice& device) {
            if (host.rank() == 1) device.before(call, [] { throw DeviceError("not permitted"); });
            if (wish == DeviceEngine::Ipc) {
              CHECK_CONTAINS(CHECK_THROWS(InvalidArgument, make(Library())), "on rank 1: not permitted");
              return;
            }
            const MadeDeviceGroup made = make(Library());
            CHECK_EQ(made.choice.engine, DeviceEngine::Staging);
            CHECK_CONTAINS(made.choice.why, "no ipc: on rank 1: not permitted");
          });
    }
  }
  // The other ranks' stages are released.
  testing::wait_until([&] {
    release_deferred();
    return count_deferred() == kept_before;
  });
}

TEST(device_group_that_one_rank_cannot_make_fails_on_all) {
  run_making(2, DeviceEngine::Auto, shared_by_two, [](const Make& make, Group& host, auto&) {
    const auto deaf = [rank = host.rank()]() -> std::string {
      if (rank == 1) throw DeviceError("the driver does not answer");
      return "";
    };
    CHECK_CONTAINS(CHECK_THROWS(Error, make(Library(deaf))), "the driver does not answer");
  });
}

}  // namespace
}  // namespace ours
