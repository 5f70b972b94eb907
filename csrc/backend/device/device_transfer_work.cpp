#include "backend/device/device_transfer_work.h"

#include "backend/unlocked.h"

namespace ours {

DeviceTransferWork::DeviceTransferWork(const TransferRequest& request, int rank, std::shared_ptr<GroupStatus> status,
                                       const std::shared_ptr<DeviceSide>& side)
    : OursWork(request.op, rank, std::move(status), {request.tensor},
               request.op == Op::Send ? Outputs{} : Outputs{{request.tensor}}, std::chrono::milliseconds(-1)),
      dtype_(dtype_of(request.tensor)),
      limit_(std::make_shared<TransferLimit>(getTimeout())),
      peer_(request.peer),
      tag_(request.tag),
      input_(request.op == Op::Send ? contiguous_source(request.tensor) : at::Tensor()),
      output_(request.op == Op::Send ? Output() : Output(request.tensor)),
      order_(DeviceCall::make(side, request.tensor.device(), name_of(request.op), DeviceCall::Where::OnDevice)) {
  set_sequence(request.sequence);
}

Span DeviceTransferWork::memory() const {
  if (!sends()) return output_.span();
  // A send's memory is only read.
  return {const_cast<void*>(input_.const_data_ptr()), bytes_of(input_)};
}

bool DeviceTransferWork::wait(std::chrono::milliseconds timeout) {
  if (timeout.count() <= 0) limit_->start();
  // The sender's rank is asked for next, by dist.recv() at once.
  const bool on_host = order_->blocks_host() || op_ == Op::RecvAnySource;
  if (!on_host && timeout.count() <= 0 && !done()) {
    if (!hold_current_stream()) wait_as_stream();
    if (done()) rethrow();
    return true;
  }
  std::unique_lock<std::mutex> lock(mutex_);
  const auto ended = [this] { return done(); };
  const bool in_time = await(lock, timeout, ended);
  lock.unlock();
  if (!in_time) throw_wait_timeout(timeout);
  rethrow();
  return true;
}

void DeviceTransferWork::synchronize() {
  if (done()) return;
  limit_->start();
  run_unlocked([this] {
    if (order_->blocks_host() || !hold_current_stream()) wait_as_stream();
  });
}

c10::intrusive_ptr<c10::ivalue::Future> DeviceTransferWork::getFuture() {
  auto future = OursWork::getFuture();
  watch_future(*limit_);
  return future;
}

void DeviceTransferWork::wait_as_stream() {
  std::unique_lock<std::mutex> lock(mutex_);
  // The gate of a send opens when its memory has been read. That of a receive, too, where the group has failed.
  await(lock, kNoTimeout, [this] { return done() || (sends() && order_->is_open()); });
  counted_on_.store(true);
}

void DeviceTransferWork::tell_waiters() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
  }
  cv_.notify_all();
}

void DeviceTransferWork::run_callbacks() noexcept {
  if (exception()) return OursWork::run_callbacks();
  try {
    order_->on_own_stream([this] { OursWork::run_callbacks(); });
  } catch (const std::exception& e) {
    TORCH_WARN("the callbacks on the future of ", name_of(op_), " did not run: ", e.what());
  }
}

bool DeviceTransferWork::hold_current_stream() {
  if (!order_->hold_current_stream()) return false;
  counted_on_.store(true);
  return true;
}

}  // namespace ours
