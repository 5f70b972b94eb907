#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "backend/comm_queue.h"
#include "backend/device/device_call.h"
#include "backend/work.h"
#include "collectives/group.h"

namespace ours {

/// A collective to run: its tensors, what to do with them, and how it was called.
struct Collective {
  DType dtype = DType::UInt8;
  std::vector<at::Tensor> inputs;
  std::vector<std::vector<at::Tensor>> outputs;
  /// Does the operation, and owns all tensors that it touches.
  std::function<void(Group&, const Call&)> body;
  /// For a collective that works on the CPU without tensors: it runs after the current stream of this device.
  std::optional<at::Device> behind{};
  Op op{};  ///< this field and the following ones are filled in by launch()
  bool async_op = true;
  std::chrono::milliseconds timeout{-1};  ///< < 0: the group's timeout
};

/// A collective of a group, which the group's CommQueue runs.
class CollectiveWork final : public OursWork {
 public:
  CollectiveWork(Collective collective, std::shared_ptr<Group> group, std::shared_ptr<CommQueue> queue,
                 std::shared_ptr<GroupStatus> status);

  /// Blocks until the operation has ended and throws its error. If the operation is enqueued on a device (DeviceCall)
  /// and no timeout is given, it makes the current stream wait instead, and throws the error if there is one by now.
  /// A `timeout` (0: none) that passes first throws too, and leaves the operation and the group as they are.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  /// Like wait() for device tensors, but throws no error of an operation that the host waits for; does nothing for
  /// those of the CPU.
  void synchronize() override;

  /// If the operation is enqueued on a device, the future is complete at once: callbacks run in streams that come
  /// after it.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// For device tensors: sets their part in the device's order of work. Called before execute().
  void set_device_call(std::unique_ptr<DeviceCall> call) { device_call_ = std::move(call); }

  /// Called instead of execute() for a collective that was captured into a graph: the Work is complete, and keeps its
  /// tensors.
  void complete_captured() noexcept;

  /// Says that a callback of that origin starts it. Called before submit().
  void set_origin(Origin origin) { origin_ = std::move(origin); }

  /// The origin of collectives that callbacks on its future start.
  Origin origin() const;

  /// Sets its number among the queue's collectives. Called before execute().
  void set_sequence(uint64_t count);

  /// Runs the operation and completes the Work, except for its callbacks. The queue calls it once.
  void execute() noexcept;

  using OursWork::has_callbacks;
  void run_callbacks() noexcept;

 protected:
  /// Returns the device even if there is no output, because callbacks must not run in the stream in which the future
  /// is completed.
  std::vector<at::Device> devices() const override;

 private:
  const DType dtype_;
  std::function<void(Group&, const Call&)> body_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<CommQueue> queue_;
  std::unique_ptr<DeviceCall> device_call_;  // null for CPU tensors
  std::optional<Origin> origin_;             // set if a callback started it
};

}  // namespace ours
