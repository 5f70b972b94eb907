#pragma once

#include <atomic>
#include <memory>

#include "backend/device/host_call.h"
#include "backend/tensors.h"
#include "backend/transfer_work.h"
#include "backend/work.h"

namespace ours {

/// One send or receive of a device tensor; DeviceTransfers moves it.
class DeviceTransferWork final : public OursWork {
 public:
  /// Made at the call, on the caller's thread. Throws RuntimeError if the current stream is being captured.
  DeviceTransferWork(const TransferRequest& request, int rank, std::shared_ptr<GroupStatus> status,
                     const std::shared_ptr<DeviceContext>& context);

  /// Like CollectiveWork::wait. The transfer's own time runs from the first wait without a `timeout`.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;

  /// The same as TransferWork::getFuture.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// The sender's rank in the group, once a receive is done.
  int sourceRank() const override { return source_; }

 protected:
  std::vector<at::Device> devices() const override { return {order_->device()}; }
  void in_stream(const std::function<void()>& body) const override { order_->on_stream(body); }

 private:
  friend class DeviceTransfers;

  bool sends() const { return op_ == Op::Send; }
  /// The contiguous device memory that is sent or received.
  Span memory() const;

  const DType dtype_;
  const TransferLimitPtr limit_;
  const int peer_;
  const int tag_;
  const at::Tensor input_;  // for a send
  const Output output_;     // for a receive
  // Made after the tensors, so that it comes after the copies that they ask torch for.
  const std::unique_ptr<HostCall> order_;
  std::atomic<int> source_{-1};
};

}  // namespace ours
