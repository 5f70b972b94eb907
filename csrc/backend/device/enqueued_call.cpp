#include "backend/device/enqueued_call.h"

#include "common/options.h"
#include "device/deferred_release.h"

namespace ours {

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
