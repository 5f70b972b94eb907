#include "backend/device/device_side.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>

#include "backend/device/device_solo.h"
#include "backend/device/devices.h"
#include "collectives/device/hosted_group.h"
#include "device/keep_forever.h"

namespace ours {

DeviceSide::~DeviceSide() {
  disposal_->close();
  if (!hold_check_) return;
  std::vector<StreamHandle> streams{stream_->handle(), transfer_stream_->handle()};
  if (const auto* const hosted = dynamic_cast<const HostedGroup*>(made_.group.get())) {
    for (const StreamHandle stream : hosted->streams()) streams.push_back(stream);
  }
  hold_check_->release(streams);
  if (!kept_.empty() && !have_ended(streams)) keep_forever(std::make_shared<decltype(kept_)>(std::move(kept_)));
}

bool DeviceSide::have_ended(const std::vector<StreamHandle>& streams) const noexcept {
  try {
    return std::all_of(streams.begin(), streams.end(), [this](StreamHandle stream) {
      const std::unique_ptr<DeviceEvent> event = accelerator_->make_event();
      event->record(stream);
      return settles(*event, accelerator_->patience());
    });
  } catch (const std::exception&) {
    return false;
  }
}

std::optional<at::Device> DeviceSide::device() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return device_;
}

void DeviceSide::use(at::Device device) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (device_) {
    TORCH_CHECK_VALUE(*device_ == device, "this process group works on ", *device_, " of this rank, but was given ",
                      device, "; use one device a rank, or a group of its own for each (new_group)");
    return;
  }
  library_ = &device_library_of(device.type());
  accelerator_ = library_->device(device.index());
  stream_ = accelerator_->make_stream();
  transfer_stream_ = accelerator_->make_stream();
  hold_check_ = HoldCheck::of(accelerator_);
  hold_check_->need({stream_->handle(), transfer_stream_->handle()});
  device_ = device;
}

StreamHandle DeviceSide::current_stream() const {
  const c10::impl::VirtualGuardImpl guard(device_->type());
  return guard.getStreamNativeHandle(guard.getStream(*device_));
}

c10::Stream DeviceSide::stream_of(const DeviceStream& stream) const {
  // Torch knows a stream that it has not made by its handle.
  return c10::Stream(c10::Stream::UNSAFE, *device_, reinterpret_cast<c10::StreamId>(stream.handle()));
}

Group& DeviceSide::group(const Call& call) {
  if (const std::shared_ptr<Group> made = made_group()) return *made;
  // Not under the lock: abort() has to get through meanwhile. Nobody else makes one, since collectives run one by one.
  MadeDeviceGroup made;
  if (host_->size() == 1) {
    made.group = make_device_solo_group(host_, accelerator_, stream_);
  } else {
    made = make_device_group(host_, accelerator_, *library_, call);
    if (auto* const hosted = dynamic_cast<HostedGroup*>(made.group.get())) {
      hosted->set_on_failure([weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->open_gates();
      });
      hold_check_->need(hosted->streams());
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  made_ = std::move(made);
  return *made_.group;
}

std::shared_ptr<Group> DeviceSide::made_group() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return made_.group;
}

bool DeviceSide::may_hold(StreamHandle stream) {
  const HoldCheck::Answer answer = hold_check_->may_hold(stream);
  if (answer == HoldCheck::Answer::Never) {
    TORCH_WARN_ONCE("A stream of ", *device_,
                    " that waits for a collective would hold up those that collectives run in: they share a queue of "
                    "the hardware, or who gives the waiting stream more than it takes stops all others. So the host "
                    "waits instead, as with OURS_BLOCKING_WAIT=1. Fewer streams may help, or a larger "
                    "CUDA_DEVICE_MAX_CONNECTIONS, up to 32");
  }
  return answer == HoldCheck::Answer::Yes;
}

void DeviceSide::add(StreamGate* gate) {
  const std::lock_guard<std::mutex> lock(gates_mutex_);
  gates_.insert(gate);
  if (gates_opened_) gate->open();
}

void DeviceSide::remove(StreamGate* gate) noexcept {
  const std::lock_guard<std::mutex> lock(gates_mutex_);
  gates_.erase(gate);
}

void DeviceSide::open_gates() noexcept {
  const std::lock_guard<std::mutex> lock(gates_mutex_);
  gates_opened_ = true;
  for (StreamGate* const gate : gates_) gate->open();
}

std::string DeviceSide::engine() const {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!made_.group) return "";
  return host_->size() == 1 ? "none: the group has one rank" : name_of(made_.choice.engine) + (": " + made_.choice.why);
}

void DeviceSide::keep(std::function<void()> what) {
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(std::move(what));
}

void DeviceSide::check_alive(const Call& call) const {
  // A group that has failed throws that at once, whatever is called.
  if (!host_->failure().empty()) host_->barrier(call);
}

void DeviceSide::abort(const std::string& reason) const {
  if (const std::shared_ptr<Group> made = made_group()) made->abort(reason);
}

void DeviceSide::leave() const noexcept {
  if (const std::shared_ptr<Group> made = made_group()) made->leave();
}

}  // namespace ours
