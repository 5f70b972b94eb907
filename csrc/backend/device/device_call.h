#pragma once

#include <functional>
#include <memory>

#include "backend/device/device_side.h"

namespace ours {

/// What makes a collective part of the device's order of work, although the host runs it: it begins after all that the
/// current stream had been given when it was called, and streams that wait for it are held until it has ended.
///
/// What its tensors need no record_stream() for: whoever runs it keeps them until the host knows that the device has
/// done with them, and only then can their memory be given to others.
class DeviceCall {
 public:
  using Body = std::function<void(Group&, const Call&)>;

  enum class Where { OnDevice, OnHost };

  /// At the call, on the caller's thread. OnHost: the body works on the CPU, but waits for the device nevertheless, and
  /// who waits for it waits on the host. Throws RuntimeError where the current stream is being captured into a graph.
  static std::unique_ptr<DeviceCall> make(std::shared_ptr<DeviceSide> side, at::Device device, const char* name,
                                          Where where);

  /// Waits for what came before, runs `body`, and returns when the device has done what it asked torch for.
  void run(const Body& body, const Call& call);

  /// Whether the device has done what came before.
  bool reached() { return point_->reached(); }

  /// Lets the streams go on; once run() has returned or thrown.
  void open() noexcept { done_->open(); }

  bool is_open() const { return done_->is_open(); }

  /// Makes the current stream wait until open(). False, and nothing done, where it could hold up what it waits for.
  [[nodiscard]] bool hold_current_stream();

  /// Whether who waits for the collective wants the host to wait.
  bool blocks_host() const { return blocks_host_; }

  /// Whether no collective has ended well yet. No stream may be held for the first: it makes the Group for the device,
  /// streams and memory, and that may wait for all of the device's streams.
  bool is_first() const { return !side_->works(); }

  /// Where to leave what may own tensors.
  const std::shared_ptr<Disposal>& disposal() const { return side_->disposal(); }

  at::Device device() const { return *side_->device(); }

  /// Calls `body` with a stream of ours as torch's current one.
  void on_own_stream(const std::function<void()>& body) const;

  ~DeviceCall();
  DeviceCall(const DeviceCall&) = delete;
  DeviceCall& operator=(const DeviceCall&) = delete;

 private:
  DeviceCall(std::shared_ptr<DeviceSide> side, const char* name, Where where);

  void await_copies(const Call& call);
  void refuse_capture(const char* doing) const;

  const std::shared_ptr<DeviceSide> side_;
  const char* const name_;
  const Where where_;
  const bool blocks_host_;
  /// Behind what the current stream had been given at the call; later, behind what torch was asked for since.
  const std::unique_ptr<DeviceEvent> point_;
  const std::unique_ptr<StreamGate> done_;
};

}  // namespace ours
