#include "backend/device/device_transfer_work.h"

namespace ours {

DeviceTransferWork::DeviceTransferWork(const TransferRequest& request, int rank, std::shared_ptr<GroupStatus> status,
                                       const std::shared_ptr<DeviceContext>& context)
    : OursWork(request.op, rank, std::move(status), {request.tensor},
               request.op == Op::Send ? Outputs{} : Outputs{{request.tensor}}, std::chrono::milliseconds(-1)),
      dtype_(dtype_of(request.tensor)),
      limit_(std::make_shared<TransferLimit>(getTimeout())),
      peer_(request.peer),
      tag_(request.tag),
      input_(request.op == Op::Send ? contiguous_source(request.tensor) : at::Tensor()),
      output_(request.op == Op::Send ? Output() : Output(request.tensor)),
      order_(std::make_unique<HostCall>(context, name_of(request.op), HostCall::Where::OnDevice)) {
  set_sequence(request.sequence);
}

Span DeviceTransferWork::memory() const {
  if (!sends()) return output_.span();
  // A send only reads this memory.
  return {const_cast<void*>(input_.const_data_ptr()), bytes_of(input_)};
}

bool DeviceTransferWork::wait(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) limit_->start();
  if (!await_done(timeout)) throw_wait_timeout(timeout);
  rethrow();
  return true;
}

void DeviceTransferWork::synchronize() {
  if (done()) return;
  limit_->start();
  await_done(kNoTimeout);
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceTransferWork::getFuture() {
  auto future = OursWork::getFuture();
  watch_future(*limit_);
  return future;
}

}  // namespace ours
