#pragma once

#include <functional>
#include <memory>

#include "backend/device/device_context.h"

namespace ours {

/// The device's part of a collective: its place among the work of streams, and what does it. There are two kinds. A
/// HostCall is run by the host, on the comm thread, and wait() lets the host wait. An EnqueuedCall was given to the
/// device by the caller's thread; the comm thread only watches it, and wait() lets the current stream wait.
///
/// Tensors need no record_stream(): the Work keeps them until the host knows that the device is done with them.
class DeviceCall {
 public:
  using Body = std::function<void(Group&, const Call&)>;

  virtual ~DeviceCall() = default;
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

  /// Runs on the comm thread, in the order of calls. Returns when the device has done the collective, or throws its
  /// error.
  virtual void run(const Body& body, const Call& call) = 0;

  /// Whether the collective is on its way to stream(), so that streams and futures need not wait for the host.
  virtual bool is_enqueued() const { return false; }

  /// Whether the collective is part of a graph, so that it is not known when it runs, and it is not watched.
  virtual bool is_captured() const { return false; }

  /// Makes the current stream wait for the end of an enqueued collective.
  virtual void block_current_stream() {}

  /// A stream for what torch does after the collective.
  virtual StreamHandle stream() const { return context_->own_stream(); }

  /// Calls `body` with stream() as torch's current one.
  void on_stream(const std::function<void()>& body) const;

  at::Device device() const { return *context_->device(); }
  DeviceContext& context() const { return *context_; }

 protected:
  explicit DeviceCall(std::shared_ptr<DeviceContext> context) : context_(std::move(context)) {}

 private:
  const std::shared_ptr<DeviceContext> context_;
};

}  // namespace ours
