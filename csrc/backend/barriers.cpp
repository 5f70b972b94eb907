#include <ATen/DeviceAccelerator.h>

#include "backend/process_group.h"

// The collectives that move no data. They run on the CPU. In a group that works on a device they come after what the
// device's current stream has been given, and hold up the host, like NCCL's.

namespace ours {

namespace {

/// On a machine without devices, callers may still name one: `dist.barrier(device_ids=[0])` means the device type that
/// torch was compiled for. Such a device has no work to wait for.
std::optional<at::Device> if_devices_exist(std::optional<at::Device> device) {
  return at::accelerator::deviceCount() > 0 ? device : std::nullopt;
}

}  // namespace

std::optional<at::Device> ProcessGroupOurs::device_of(const c10d::BarrierOptions& opts) const {
  if (opts.device) return opts.device->is_cpu() ? std::nullopt : if_devices_exist(opts.device);
  std::optional<at::Device> device = devices_->device();
  if (!device) device = getBoundDeviceId();
  if (opts.device_ids.empty()) return device;
  const auto type = device ? std::optional(device->type()) : at::getAccelerator();
  if (!type) return std::nullopt;
  return if_devices_exist(at::Device(*type, static_cast<c10::DeviceIndex>(opts.device_ids.front())));
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::barrier(const c10d::BarrierOptions& opts) {
  return launch(Op::Barrier, opts, [&]() -> Collective {
    return {DType::UInt8, {}, {}, [](Group& group, const Call& call) { group.barrier(call); }, device_of(opts)};
  });
}

void ProcessGroupOurs::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  c10d::BarrierOptions waiting = opts;
  waiting.asyncOp = false;
  const WorkPtr work = launch(Op::MonitoredBarrier, waiting, [&]() -> Collective {
    return {DType::UInt8, {}, {}, [wait_all_ranks](Group& group, const Call& call) {
              group.monitored_barrier(call, wait_all_ranks);
            }};
  });
  if (work) work->wait();
}

void ProcessGroupOurs::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cpu()) return;
  status_->check_usable();
  connect_device(device, status_->timeouts.get(), nullptr);
}

void ProcessGroupOurs::connect_device(at::Device device, Milliseconds timeout, const Callback* callback) {
  with_torch_errors(status_->where(), [&] { devices_->use(device); });
  if (devices_->made_group()) return;
  // In the order of the collectives, as all that ranks do together. The host waits.
  const auto make = [devices = devices_](Group&, const Call& call) { devices->make_group(call); };
  Collective meeting{DType::UInt8, {}, {}, make};
  meeting.op = Op::Barrier;
  meeting.async_op = false;
  start(std::move(meeting), timeout, callback)->wait();
}

}  // namespace ours
