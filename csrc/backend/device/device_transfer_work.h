#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "backend/device/device_call.h"
#include "backend/transfer_work.h"

namespace ours {

class DeviceTransfers;

/// A send or a receive of a device tensor, through pinned memory and the messages of the CPU. A send copies when the
/// device has come to the call's place in the current stream, and then posts the message. A receive posts it at the
/// call, so that receives are matched in the order of calls, and then copies, behind that place as well.
class DeviceTransferWork final : public TransferWork {
 public:
  using Destination = std::pair<int, int>;  ///< rank and tag

  /// Made at the call, on the caller's thread. Throws RuntimeError if the current stream is being captured.
  DeviceTransferWork(const TransferRequest& request, const std::shared_ptr<PointToPoint>& messages,
                     std::shared_ptr<GroupStatus> status, const std::shared_ptr<DeviceContext>& context,
                     std::weak_ptr<DeviceTransfers> transfers);

  void synchronize() override;

  // ---- for DeviceTransfers, on its thread
  /// Whether the device has copied, which it is asked for as soon as that is possible, and the work is not `held_up` by
  /// an earlier send. Throws if that cannot be, or takes too long.
  bool may_go_on(bool held_up);
  /// Called when may_go_on() has returned true, or with the `error` that it has thrown.
  void go_on(std::exception_ptr error) noexcept;
  /// Of a send.
  std::optional<Destination> destination() const;

 protected:
  void begin() override;
  TransferCallbacks message_ended(std::exception_ptr error) noexcept override;
  std::vector<at::Device> devices() const override { return {device_}; }
  void in_stream(const std::function<void()>& body) const override { order_->on_stream(body); }

 private:
  /// Throws if the wait for the copy, or for what comes before, has to end; or lets only the future's callbacks have
  /// the error.
  void check_wait(bool for_copy);
  void copy();
  /// Sends or receives the pinned memory.
  void exchange();
  /// Has DeviceTransfers wait for the device. Throws if that is impossible.
  void wait_for_device();
  /// Runs the callbacks on another thread; here if the group is gone.
  void call(TransferCallbacks callbacks);
  /// Ends the Work, and has its callbacks called. Then it keeps nothing of the group.
  void finish(const std::exception_ptr& error) noexcept;

  const at::Device device_;
  const std::weak_ptr<DeviceTransfers> transfers_;  // weak, since the user may keep the Work longer than the group
  // Made after the tensors of TransferWork, so that it comes after the copies that they ask torch for.
  std::optional<HostCall> order_;        // until the Work and its callbacks have ended
  at::Tensor pinned_;                    // torch's allocator uses its memory again as soon as this is dropped
  std::unique_ptr<DeviceEvent> copied_;  // once the device has been asked to copy
};

}  // namespace ours
