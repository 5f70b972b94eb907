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

/// A collective to run: its memory, what to do with it, and how it was called.
struct Collective {
  DType dtype = DType::UInt8;
  std::vector<at::Tensor> inputs;
  std::vector<std::vector<at::Tensor>> outputs;
  /// Does the operation; owns all tensors that it touches.
  std::function<void(Group&, const Call&)> body;
  /// The device whose current stream a collective without tensors comes after, though it works on the CPU.
  std::optional<at::Device> behind{};
  Op op{};  ///< this and the rest are for launch() to fill in
  bool async_op = true;
  std::chrono::milliseconds timeout{-1};  ///< < 0: the group's
};

/// One collective of a group, run by its CommQueue.
class CollectiveWork final : public OursWork {
 public:
  CollectiveWork(Collective collective, std::shared_ptr<Group> group, std::shared_ptr<CommQueue> queue,
                 std::shared_ptr<GroupStatus> status);

  /// Blocks until the operation has ended and throws its error. Of device tensors, where no timeout is given: makes the
  /// current stream wait instead where that can be (see DeviceCall), and throws the error if the operation
  /// has failed by now. A `timeout` (0: none) that passes before throws too, and leaves the operation and the group as
  /// they are.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  /// Makes the current stream wait until the operation has ended, or the host; nothing to do for CPU tensors.
  void synchronize() override;

  /// Of device tensors: their part in the device's order of work. Before execute().
  void set_device_call(std::unique_ptr<DeviceCall> call) { device_call_ = std::move(call); }

  /// It is started by a callback of that origin; before submit().
  void set_origin(Origin origin) { origin_ = std::move(origin); }

  /// Whose callbacks those on its future are.
  Origin origin() const;

  /// Which of the queue's collectives it is; before execute().
  void set_sequence(uint64_t count);

  /// Runs the operation and completes the Work, but for its callbacks. Called once, by the queue.
  void execute() noexcept;

  /// Drops a reference, which may be the last, and with it tensors and callbacks of Python. Never waits for a device.
  static void drop(c10::intrusive_ptr<CollectiveWork> work);

  using OursWork::has_callbacks;
  void run_callbacks() noexcept;

 protected:
  /// Where there is no output, too: callbacks must not run in the stream in which the future is completed.
  std::vector<at::Device> devices() const override;

 private:
  /// Whether a stream may wait for it instead of the host: it is of device tensors, under way, and not the first, and
  /// nobody wants the host to wait.
  bool may_hold_stream() const;

  const DType dtype_;
  std::function<void(Group&, const Call&)> body_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<CommQueue> queue_;
  std::unique_ptr<DeviceCall> device_call_;  // null: of CPU tensors
  std::optional<Origin> origin_;             // none: no callback started it
};

}  // namespace ours
