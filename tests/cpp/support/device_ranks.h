#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/device/ipc_group.h"
#include "collectives/device/staging_group.h"
#include "cuda/nccl_group.h"
#include "support/fake_nccl.h"
#include "support/groups.h"
#include "support/stand_in_device.h"

namespace ours::testing {

/// The device of a rank. Ranks with the same identity share one, as processes do, each with a view of its own.
inline std::shared_ptr<StandInDevice> make_device(const std::string& identity) {
  return StandInDevice::make(StandInOptions{identity});
}

/// A rank of a test that uses its device.
struct DeviceRank {
  std::shared_ptr<StandInDevice> device;
  std::shared_ptr<Group> group;

  int number() const { return group->rank(); }
};

/// How often the device is given work of that name ("reduce", "copy") from now on.
inline std::shared_ptr<const std::atomic<int>> count_calls(StandInDevice& device, const std::string& name) {
  auto calls = std::make_shared<std::atomic<int>>(0);
  device.before(name, [calls] { ++*calls; });
  return calls;
}

using MakeOnDevice = std::function<std::shared_ptr<Group>(std::shared_ptr<Group> host, std::shared_ptr<Device> device)>;

/// Runs fn on ranks with such devices, whose groups `make` makes over shared memory.
inline void run_on_devices(int ranks, const std::function<StandInOptions(int rank)>& devices, const MakeOnDevice& make,
                           const std::function<void(DeviceRank&)>& fn) {
  const auto hosts = node_kind("", Setting::Auto).make(ranks, 0);
  run_ranks(ranks, [&](int rank) {
    const auto device = StandInDevice::make(devices(rank));
    DeviceRank self{device, make(hosts[static_cast<size_t>(rank)](), device)};
    fn(self);
  });
}

/// Slots have that many bytes; 0 means the default.
inline MakeOnDevice ipc_maker(size_t slot) {
  return [slot](std::shared_ptr<Group> host, std::shared_ptr<Device> device) {
    const size_t stage = IpcGroup::kSlots * (slot == 0 ? IpcGroup::kSlotBytes : slot);
    auto memory = IpcMemory::share(*host, device, call_of(Op::Barrier, DType::UInt8, 0), stage);
    CHECK_EQ(memory->why_not(), std::string());
    return std::make_shared<IpcGroup>(std::move(host), std::move(device), std::move(memory));
  };
}

/// `kept`: how much pinned memory a group always keeps; 0 means the default.
inline MakeOnDevice staging_maker(size_t kept) {
  return [kept](std::shared_ptr<Group> host, std::shared_ptr<Device> device) {
    return std::make_shared<StagingGroup>(std::move(host), std::move(device),
                                          kept == 0 ? StagingGroup::kKeptBytes : kept);
  };
}

/// Over NCCL, which has chunks of its own.
inline std::shared_ptr<cuda::NcclGroup> make_nccl(std::shared_ptr<Group> host, std::shared_ptr<Device> device) {
  auto nccl = std::make_shared<FakeNccl>(std::static_pointer_cast<StandInDevice>(device), host->size());
  return cuda::NcclGroup::make(std::move(nccl), std::move(host), std::move(device),
                               Deadline::after(std::chrono::seconds(60)));
}

/// Calls a group as the backend does: gives the device its work first, and compares afterwards.
class Enqueueing final : public DeviceGroupBase {
 public:
  Enqueueing(const std::shared_ptr<Group>& host, const std::shared_ptr<Device>& device)
      : DeviceGroupBase(host, device), group_(make_nccl(host, device)), stream_(device->make_stream()) {}

  void abort(const std::string& reason) override { group_->abort(reason); }
  void leave() noexcept override { group_->leave(); }
  std::vector<StreamHandle> streams() const override { return group_->streams(); }

 protected:
  void check_usable(const Call&) override {}
  void guarded(const Running&, const std::function<void()>& body) override {
    try {
      body();
    } catch (...) {
      // The group waits for its device only so long, and the backend keeps what that may touch. A test does not, and
      // the device may be slow where a sanitizer or another program takes the cores.
      for (const StreamHandle stream : streams()) static_cast<StandInDevice&>(device()).synchronize(stream);
      throw;
    }
  }
  void do_barrier(const Running& run) override { group_->barrier(run.call); }
  void do_reduce(const Running& run, const Reducing& job) override {
    enqueue(run.call, [&] { group_->reduce(run.call, job); });
  }
  void do_reduce_scatter(const Running& run, const Scattering& job) override {
    enqueue(run.call, [&] { group_->reduce_scatter(run.call, job); });
  }
  void do_exchange(const Running& run, const ExchangePlan& plan) override {
    enqueue(run.call, [&] { group_->exchange(run.call, plan); });
  }

 private:
  void enqueue(const Call& call, const std::function<void()>& body) {
    group_->watch(call, group_->enqueue(call, stream_->handle(), body));
  }

  const std::shared_ptr<EnqueueGroup> group_;
  const std::unique_ptr<DeviceStream> stream_;
};

/// Groups over host memory that pass for groups over device memory: a stand-in device works on host memory, so
/// everything that holds for a Group can be tested with the same buffers.
inline GroupKind device_kind(const std::string& name, const GroupKind& hosts,
                             const std::function<std::string(int rank)>& devices,
                             const std::function<MakeOnDevice(size_t chunk)>& maker) {
  const auto make = [hosts, devices, maker](int ranks, size_t chunk) {
    std::vector<std::function<std::shared_ptr<Group>()>> makers;
    for (const auto& host : hosts.make(ranks, chunk)) {
      const std::string identity = devices(static_cast<int>(makers.size()));
      makers.emplace_back([host, identity, make = maker(chunk)] { return make(host(), make_device(identity)); });
    }
    return makers;
  };
  return {name, make, hosts.order_by_chunks, true};
}

/// `enqueues`: called as the backend calls it.
inline GroupKind nccl_kind(const std::string& name, bool enqueues) {
  const auto make = [enqueues](const std::shared_ptr<Group>& host,
                               const std::shared_ptr<Device>& device) -> std::shared_ptr<Group> {
    if (enqueues) return std::make_shared<Enqueueing>(host, device);
    return make_nccl(host, device);
  };
  GroupKind kind = device_kind(
      name, node_kind("", Setting::Auto), [](int r) { return std::to_string(r); }, [make](size_t) { return make; });
  kind.compares_afterwards = enqueues;
  kind.cuts_alike = true;
  kind.has = [](DType dtype, ReduceKind how) { return cuda::nccl_reduction_of(dtype, {how}, 1).has_value(); };
  return kind;
}

/// The kinds of groups over device memory.
inline const std::vector<GroupKind>& device_kinds() {
  const auto one = [](int) { return "only"; };
  const auto turns = [](int r) { return std::to_string(r % 2); };
  const auto each = [](int r) { return std::to_string(r); };
  const GroupKind node = node_kind("", Setting::Auto);
  const GroupKind nodes = hierarchical_kind("", {}, [](int r) { return r < 3 ? 0 : r; });
  static const std::vector<GroupKind> kKinds = {
      device_kind("staging over shared memory", node, one, staging_maker),
      device_kind("staging over 3 and 1 a node", nodes, each, staging_maker),
      device_kind("ipc, one device", node, one, ipc_maker),
      device_kind("ipc, two devices by turns", node, turns, ipc_maker),
      nccl_kind("nccl", false),
      nccl_kind("nccl, enqueued", true),
  };
  return kKinds;
}

}  // namespace ours::testing
