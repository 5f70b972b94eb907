#pragma once

#include <exception>
#include <functional>
#include <memory>

#include "backend/device/device_context.h"
#include "collectives/device/enqueue_group.h"

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
