#include "backend/device/device_call.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "common/options.h"

namespace ours {

namespace {

/// What torch was asked for on our own stream are copies that wait for nothing: they get so long at least.
constexpr std::chrono::milliseconds kCopyPatience{10000};

}  // namespace

DeviceCall::DeviceCall(std::shared_ptr<DeviceSide> side, const char* name, Where where)
    : side_(std::move(side)),
      name_(name),
      where_(where),
      blocks_host_(where == Where::OnHost || options().blocking_wait),
      point_(side_->accelerator().make_event()),
      done_(side_->accelerator().make_gate()) {
  side_->add(done_.get());
}

DeviceCall::~DeviceCall() { side_->remove(done_.get()); }

std::unique_ptr<DeviceCall> DeviceCall::make(std::shared_ptr<DeviceSide> side, at::Device device, const char* name,
                                             Where where) {
  side->use(device);
  std::unique_ptr<DeviceCall> call(new DeviceCall(std::move(side), name, where));
  call->refuse_capture("captured");
  call->point_->record(call->side_->current_stream());
  return call;
}

void DeviceCall::refuse_capture(const char* doing) const {
  TORCH_CHECK(!side_->accelerator().is_capturing(side_->current_stream()), name_, " of tensors on ", *side_->device(),
              " cannot be ", doing,
              ": the host takes part in it, which a graph would leave out. Keep communication out of what is captured, "
              "or give the device a backend whose collectives can be, init_process_group(\"cpu:ours,cuda:nccl\")");
}

void DeviceCall::run(const Body& body, const Call& call) {
  // Made first, since making it takes a while, and the other ranks do so as well.
  Group& group = where_ == Where::OnDevice ? side_->group(call) : side_->host();
  wait_reached(
      *point_, call.deadline, [&] { side_->check_alive(call); },
      std::string("the work on the device that ") + name_ + " comes after");
  if (where_ == Where::OnHost) return body(group, call);
  const c10::StreamGuard guard(side_->own_stream());
  try {
    body(group, call);
    await_copies(call);
  } catch (...) {
    side_->keep([body] { (void)body; });
    throw;
  }
  side_->set_works();
}

void DeviceCall::await_copies(const Call& call) {
  // An event of ours, as torch's own question after a stream would break the capture of a graph on another thread.
  point_->record(side_->own_handle());
  wait_reached(*point_, Deadline::after(std::max(call.deadline.timeout(), kCopyPatience)), nullptr,
               std::string("a copy to the tensors of ") + name_);
}

bool DeviceCall::hold_current_stream() {
  refuse_capture("waited for in a capture");
  const StreamHandle stream = side_->current_stream();
  if (!side_->may_hold(stream)) return false;
  done_->hold(stream);
  return true;
}

void DeviceCall::on_own_stream(const std::function<void()>& body) const {
  const c10::StreamGuard guard(side_->own_stream());
  body();
}

}  // namespace ours
