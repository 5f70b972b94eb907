#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "backend/collective.h"
#include "backend/comm_queue.h"
#include "backend/device/device_call.h"
#include "backend/work.h"
#include "collectives/group.h"
#include "transport/stop_notice.h"

namespace ours {

/// A collective of a group, which the group's CommQueue runs.
class CollectiveWork final : public OursWork {
 public:
  CollectiveWork(Collective collective, std::shared_ptr<Group> group, std::shared_ptr<CommQueue> queue,
                 std::shared_ptr<GroupStatus> status);

  /// Blocks until the operation has ended and throws its error. If it is enqueued on a device (DeviceCall) and there is
  /// no `timeout` (0), makes the current stream wait instead, and throws an error that is there by now. A timeout that
  /// passes first throws too, and leaves the operation and the group as they are.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Like wait() for device tensors, but throws no error of an operation that the host waits for; does nothing for
  /// those of the CPU.
  void synchronize() override;

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

  /// Does the part of the operation that waits for nobody, if it has one; returns whether it has begun. The queue calls
  /// it once at most, and execute() before it calls either for another Work.
  bool begin() noexcept;
  bool has_begun() const { return begun_; }
  bool is_of_device() const { return device_call_ != nullptr; }
  /// After begin(): whether execute() would wait for nobody, and run neither callbacks nor hooks.
  bool ends_quietly();

  /// Runs the operation, or the rest of it, and completes the Work, except for its callbacks. The queue calls it once.
  /// `awaited`: the program waits for it. Returns whether there are callbacks to run.
  bool execute(bool awaited) noexcept;
  /// Whether every rank hears from every other in it, so that all know afterwards whether one was asked to stop.
  bool tells_all() const;

  using OursWork::run_callbacks;

 protected:
  void attend() const override;
  bool has_begun_before() const override { return begun_; }
  /// Returns the device even if there is no output, because callbacks must not run in the stream in which the future
  /// is completed.
  std::vector<at::Device> devices() const override;
  void in_stream(const std::function<void()>& body) const override;
  bool is_enqueued() const override { return device_call_ && device_call_->is_enqueued(); }

 private:
  /// Notes that the operation begins. Called before make_call().
  void start();
  /// `came`: when this thread came to do that part.
  Call make_call(Part part, Clock::time_point came);
  /// How long an operation that has begun had lain, with the data of all ranks there, until execute() came at `came`.
  Clock::duration lain(Clock::time_point came) const;

  const DType dtype_;
  const uint64_t bytes_;
  uint64_t count_ = 0;  // among the queue's collectives
  std::function<void(Group&, const Call&)> body_;
  const bool can_begin_;
  bool begun_ = false;
  // From begin() or execute() on.
  std::optional<StopNotice> stop_;
  Arrivals* arrivals_ = nullptr;
  std::shared_ptr<Group> group_;
  std::shared_ptr<CommQueue> queue_;
  std::unique_ptr<DeviceCall> device_call_;  // null for CPU tensors
  std::optional<Origin> origin_;             // set if a callback started it
};

}  // namespace ours
