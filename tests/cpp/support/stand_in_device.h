#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "common/shared_memory.h"
#include "device/device.h"
#include "support/stand_in_stream.h"

namespace ours::testing {

struct StandInOptions {
  std::string identity = "stand-in-0";
  /// Whether it can use the memory of devices with other identities.
  bool reaches_others = true;
  /// Whether all streams share one thread, as streams may share a queue of the hardware.
  bool one_queue = false;
  /// Empty if the device is not part of a board.
  std::string hardware = {};
};

/// A device made of the host: its streams are threads, and its memory is shared memory that other processes can map.
/// The null handle is its default stream. Work that a stream is given may run at once or much later, as on a real
/// device.
class StandInDevice : public Device {
 public:
  static std::shared_ptr<StandInDevice> make(const StandInOptions& options = {});
  ~StandInDevice() override;

  std::string identity() const override { return options_.identity; }
  std::string hardware() const override { return options_.hardware.empty() ? options_.identity : options_.hardware; }
  bool reaches(const std::string& identity) const override;
  size_t memory_bytes() const override { return size_t{1} << 30; }

  std::unique_ptr<DeviceStream> make_stream() override;
  std::unique_ptr<DeviceEvent> make_event() override;
  bool is_capturing(StreamHandle stream) const override;
  void apart_from_captures(const std::function<void()>& body) const override;

  MemoryHandle share(const void* memory) override;
  std::shared_ptr<void> map(const MemoryHandle& handle) override;

  void copy(void* to, const void* from, size_t bytes, StreamHandle stream) override;
  void reduce(const std::vector<void*>& results, const std::vector<const void*>& sources, size_t count, DType dtype,
              const Reduction& reduction, StreamHandle stream) override;

  // For tests. All may be called from any thread.

  /// Gives the stream work of the host's. If it throws, the device fails.
  void run(StreamHandle stream, std::function<void()> work);
  /// Waits until all that the stream was given is done; ends the process if that takes a minute.
  void synchronize(StreamHandle stream);
  /// Stops the stream until the returned point is reached, or dropped.
  std::shared_ptr<StandInPoint> stop(StreamHandle stream);
  /// Stops every copy() from now on until the returned point is reached, or dropped.
  std::shared_ptr<StandInPoint> stop_copies();
  /// Begins a capture, which streams that wait for `stream` join, or ends all of them.
  void set_capturing(StreamHandle stream, bool capturing);
  /// Throws DeviceError during a capture, unless apart_from_captures() calls this: for what would break the capture.
  void check_no_capture() const;
  /// From now on `call`, a method of that name or "free", runs `what` first, which may take its time, or throw.
  void before(const std::string& call, std::function<void()> what) { state_->before(call, std::move(what)); }
  /// From now on every call throws DeviceError, and so do events that are asked.
  void fail(const std::string& why) { state_->fail(why); }

 private:
  friend class StandInStream;
  friend class StandInEvent;

  explicit StandInDevice(const StandInOptions& options);
  std::shared_ptr<void> make_pinned(size_t bytes) override;
  std::shared_ptr<void> make_memory(size_t bytes) override;
  /// Runs what before("free") says first.
  std::shared_ptr<void> freed_after_a_look(std::shared_ptr<void> memory) const;
  /// Throws DeviceError if there is no such stream (any more).
  StandInQueue& queue_of(StreamHandle stream) const;
  void push(const char* call, StreamHandle stream, std::function<void()> work);
  void forget(StreamHandle stream);

  const StandInOptions options_;
  const std::shared_ptr<StandInState> state_ = std::make_shared<StandInState>();
  mutable std::mutex mutex_;
  std::map<StreamHandle, StandInQueue*> streams_;  ///< null: the default stream
  std::set<StreamHandle> capturing_;
  std::shared_ptr<StandInPoint> before_copies_;
  std::vector<std::unique_ptr<StandInQueue>> queues_;  ///< the first is the default stream's
};

}  // namespace ours::testing
