#include "backend/device/host_call.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>

namespace ours {

namespace {

/// The copies that torch runs on our own stream wait for nothing, so they get at least this long.
constexpr std::chrono::milliseconds kCopyPatience{10000};

}  // namespace

void DeviceCall::on_stream(const std::function<void()>& body) const {
  const c10::StreamGuard guard(context_->torch_stream(stream()));
  body();
}

HostCall::HostCall(std::shared_ptr<DeviceContext> context, const char* name, Where where)
    : DeviceCall(std::move(context)), name_(name), where_(where), point_(this->context().accelerator().make_event()) {
  const StreamHandle current = this->context().current_stream();
  TORCH_CHECK(!this->context().accelerator().is_capturing(current), name_, " of tensors on ", device(),
              " cannot be captured: the host takes part in it, which a graph would leave out. Keep communication out "
              "of what is captured, or give the device a backend whose collectives can be, "
              "init_process_group(\"cpu:ours,cuda:nccl\")");
  point_->record(current);
}

void HostCall::run(const Body& body, const Call& call) {
  wait_reached(
      *point_, call.deadline, [&] { context().check_alive(call); },
      std::string("the work on the device that ") + name_ + " comes after");
  if (where_ == Where::OnHost) return body(context().host(), call);
  const c10::StreamGuard guard(context().torch_stream(stream()));
  body(*context().made_group(), call);
  await_copies(call);
}

void HostCall::await_copies(const Call& call) {
  // An event of ours, because torch's own query of a stream would break the capture of a graph on another thread.
  point_->record(stream());
  wait_reached(*point_, Deadline::after(std::max(call.deadline.timeout(), kCopyPatience)), nullptr,
               std::string("a copy to the tensors of ") + name_);
}

}  // namespace ours
