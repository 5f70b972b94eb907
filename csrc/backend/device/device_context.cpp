#include "backend/device/device_context.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <utility>

#include "backend/device/devices.h"
#include "collectives/device/device_group_base.h"
#include "collectives/device/device_solo.h"
#include "device/deferred_release.h"

namespace ours {

DeviceContext::~DeviceContext() {
  // First whatever the device may still be doing for the group, then what that uses.
  made_.group = nullptr;
  if (accelerator_) release_deferred();
}

std::optional<at::Device> DeviceContext::device() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_;
}

void DeviceContext::use(at::Device device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (device_) {
    TORCH_CHECK_VALUE(*device_ == device, "this process group works on ", *device_, " of this rank, but was given ",
                      device, "; use one device a rank, or a group of its own for each (new_group)");
    return;
  }
  library_ = &device_library_of(device.type());
  accelerator_ = library_->device(device.index());
  stream_ = accelerator_->make_stream();
  send_stream_ = accelerator_->make_stream();
  receive_stream_ = accelerator_->make_stream();
  device_ = device;
}

StreamHandle DeviceContext::current_stream() const {
  const c10::impl::VirtualGuardImpl guard(device_->type());
  return guard.getStreamNativeHandle(guard.getStream(*device_));
}

c10::Stream DeviceContext::torch_stream(StreamHandle stream) const {
  // Torch knows a stream that it has not made by its handle.
  return c10::Stream(c10::Stream::UNSAFE, *device_, reinterpret_cast<c10::StreamId>(stream));
}

void DeviceContext::make_group(const Call& call) {
  if (made_group()) return;
  // Not under the lock, since abort() has to get through meanwhile. No other thread makes a group, since collectives
  // run one by one.
  MadeDeviceGroup made;
  if (host_->size() == 1) {
    made.group = make_device_solo_group(host_, accelerator_);
  } else {
    made = make_device_group(host_, accelerator_, *library_, call);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  made_ = std::move(made);
}

std::shared_ptr<Group> DeviceContext::made_group() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return made_.group;
}

std::string DeviceContext::engine() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!made_.group) return "";
  return host_->size() == 1 ? "none: the group has one rank" : name_of(made_.choice.engine) + (": " + made_.choice.why);
}

void DeviceContext::release_after_failure(std::shared_ptr<void> owned) const noexcept {
  std::vector<StreamHandle> streams{own_stream(), send_stream(), receive_stream()};
  if (const auto group = std::dynamic_pointer_cast<DeviceGroupBase>(made_group())) {
    for (const StreamHandle stream : group->streams()) streams.push_back(stream);
  }
  release_after(*accelerator_, streams, std::move(owned));
}

void DeviceContext::check_alive(const Call& call) const {
  // A failed group throws its failure from this barrier, whatever was called.
  if (!host_->failure().empty()) host_->barrier(call);
}

void DeviceContext::abort(const std::string& reason) const {
  if (const std::shared_ptr<Group> made = made_group()) made->abort(reason);
}

void DeviceContext::leave() const noexcept {
  if (const std::shared_ptr<Group> made = made_group()) made->leave();
}

}  // namespace ours
