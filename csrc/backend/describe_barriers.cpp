#include <ATen/Context.h>

#include "backend/descriptions.h"

// The calls that move no data. They run on the CPU. In a group that works on a device they come after what the device's
// current stream has been given, and hold up the host, like NCCL's.

namespace ours {

namespace {

/// The device that a barrier comes after; none for one of the CPU alone.
std::optional<at::Device> device_before(const c10d::BarrierOptions& opts, std::optional<at::Device> used) {
  std::optional<at::Device> named = opts.device;
  if (!named) {
    if (opts.device_ids.empty()) return used;
    const auto type = used ? std::optional(used->type()) : at::getAccelerator();
    if (!type) return std::nullopt;
    named = at::Device(*type, static_cast<c10::DeviceIndex>(opts.device_ids.front()));
  }
  if (named->is_cpu()) return std::nullopt;
  // On a machine without devices, callers may still name one: `dist.barrier(device_ids=[0])` means the device type that
  // torch was compiled for. Such a device has no work to wait for. at::accelerator::deviceCount() says that there is
  // one as soon as something has used fake tensors, as compilers do.
  const int devices = at::globalContext().getAcceleratorHooksInterface(named->type()).deviceCount();
  return devices == 0 ? std::nullopt : named;
}

}  // namespace

Collective describe_barrier(const Caller& /*me*/, std::optional<at::Device> used, const c10d::BarrierOptions& opts) {
  const auto body = [](Group& group, const Call& call) { group.barrier(call); };
  return {DType::UInt8, {}, {}, body, true, device_before(opts, used)};
}

Collective describe_monitored_barrier(const Caller& /*me*/, bool wait_all_ranks, const c10d::BarrierOptions& /*opts*/) {
  return {DType::UInt8, {}, {}, [wait_all_ranks](Group& group, const Call& call) {
            group.monitored_barrier(call, wait_all_ranks);
          }};
}

}  // namespace ours
