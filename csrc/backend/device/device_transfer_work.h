#pragma once

#include <atomic>
#include <memory>

#include "backend/device/device_call.h"
#include "backend/tensors.h"
#include "backend/transfer_work.h"
#include "backend/work.h"

namespace ours {

/// One send or receive of a device tensor; DeviceTransfers moves it. Streams that wait for a send go on when its tensor
/// has been read; the Work ends when the message has been handed over.
class DeviceTransferWork final : public OursWork {
 public:
  /// At the call, on the caller's thread. Throws RuntimeError where the current stream is being captured.
  DeviceTransferWork(const TransferRequest& request, int rank, std::shared_ptr<GroupStatus> status,
                     const std::shared_ptr<DeviceSide>& side);

  /// As CollectiveWork::wait; but a receive from any source waits on the host, which is told who has sent. The
  /// transfer's own time runs from the first wait without a `timeout`.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;

  /// The same as TransferWork::getFuture.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// The sender's rank in the group, once a receive is done.
  int sourceRank() const override { return source_; }

  /// As CollectiveWork's, in a stream of the group's own.
  void run_callbacks() noexcept;

 protected:
  std::vector<at::Device> devices() const override { return {order_->device()}; }

 private:
  friend class DeviceTransfers;

  /// Lets the current stream wait for it, on which the caller goes on; as DeviceCall's.
  [[nodiscard]] bool hold_current_stream();
  /// The host waits for what a stream would have waited for: of a send, that its memory has been read.
  void wait_as_stream();
  /// Once a stream need wait no longer.
  void tell_waiters();
  bool sends() const { return op_ == Op::Send; }
  /// The contiguous device memory that is sent or received.
  Span memory() const;

  const DType dtype_;
  const TransferLimitPtr limit_;
  const int peer_;
  const int tag_;
  const at::Tensor input_;  // of a send
  const Output output_;     // of a receive
  // Made after these, so that it comes after the copies that they ask torch for.
  const std::unique_ptr<DeviceCall> order_;
  std::atomic<bool> counted_on_{false};  // a stream waits for it, and its user takes it to be done
  std::atomic<int> source_{-1};
};

}  // namespace ours
