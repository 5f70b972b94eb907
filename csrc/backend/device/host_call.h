#pragma once

#include <memory>

#include "backend/device/device_call.h"

namespace ours {

/// A collective, or a transfer, that the host runs. It begins after all that the current stream had been given when
/// it was called, and has ended when the host knows that the device has done it. Then every stream sees the result.
class HostCall final : public DeviceCall {
 public:
  enum class Where { OnDevice, OnHost };

  /// Made at the call, on the caller's thread. OnHost: the body works on the CPU, but waits for the device
  /// nevertheless. Throws RuntimeError if the current stream is being captured into a graph.
  HostCall(std::shared_ptr<DeviceContext> context, const char* name, Where where);

  /// Waits for what came before, runs `body`, and returns when the device has done what `body` asked torch for.
  void run(const Body& body, const Call& call) override;

  /// Whether the device has done what came before.
  bool reached() { return point_->reached(); }

 private:
  void await_copies(const Call& call);

  const char* const name_;
  const Where where_;
  /// Behind what the current stream had been given at the call; later, behind what torch was asked for since.
  const std::unique_ptr<DeviceEvent> point_;
};

}  // namespace ours
