#include "backend/device/device_call.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>

#include "common/options.h"
#include "device/deferred_release.h"

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

EnqueuedCall::EnqueuedCall(std::shared_ptr<DeviceContext> context, std::shared_ptr<EnqueueGroup> group,
                           const Body& body, const Call& call)
    : DeviceCall(std::move(context)),
      group_(std::move(group)),
      captured_(this->context().accelerator().is_capturing(this->context().current_stream())),
      blocks_host_(options().blocking_wait && !captured_) {
  try {
    enqueued_ =
        group_->enqueue(call, this->context().current_stream(), [&] { on_stream([&] { body(*group_, call); }); });
  } catch (...) {
    if (captured_) throw;  // nothing will ask for it later
    error_ = std::current_exception();
  }
  if (captured_) {
    // The graph's memory of a tensor that is dropped meanwhile must not serve other work of the same graph.
    // The group's stream has joined the capture by now.
    const auto is_over = [group = group_, device = this->context().accelerator().shared_from_this()] {
      return !device->is_capturing(group->stream());
    };
    release_when(is_over, std::make_shared<Body>(body));
  }
}

void EnqueuedCall::run(const Body&, const Call& call) {
  if (error_) std::rethrow_exception(error_);
  group_->watch(call, enqueued_);
}

void EnqueuedCall::block_current_stream() { enqueued_.done->block(context().current_stream()); }

}  // namespace ours
