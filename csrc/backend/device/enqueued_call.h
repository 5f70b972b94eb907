#pragma once

#include <exception>
#include <memory>

#include "backend/device/device_call.h"
#include "collectives/device/enqueue_group.h"

namespace ours {

/// A collective that the caller's thread gives to the device at once: to a stream of the group's, behind what the
/// current stream has been given. The host takes no part in it, so it can be captured into a graph.
class EnqueuedCall final : public DeviceCall {
 public:
  /// Made at the call, on the caller's thread, in the order of calls. Errors are thrown by run(), so that the peers
  /// hear of them.
  EnqueuedCall(std::shared_ptr<DeviceContext> context, std::shared_ptr<EnqueueGroup> group, const Body& body,
               const Call& call);

  /// Watches the collective; `body` has already been run.
  void run(const Body& body, const Call& call) override;

  bool is_enqueued() const override { return !error_ && !blocks_host_; }
  bool is_captured() const override { return captured_; }
  void block_current_stream() override;
  StreamHandle stream() const override { return group_->stream(); }

 private:
  const std::shared_ptr<EnqueueGroup> group_;
  const bool captured_;
  const bool blocks_host_;
  EnqueueGroup::Enqueued enqueued_;
  std::exception_ptr error_;
};

}  // namespace ours
