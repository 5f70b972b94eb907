#include "backend/transfer_work.h"

#include "backend/errors.h"
#include "common/error.h"

namespace ours {

TransferWork::TransferWork(const TransferRequest& request, std::weak_ptr<PointToPoint> messages,
                           std::shared_ptr<GroupStatus> status)
    : OursWork(request.op, request.rank, std::move(status), {request.tensor},
               request.op == Op::Send ? Outputs{} : Outputs{{request.tensor}}, std::chrono::milliseconds(-1)),
      peer_(request.peer),
      tag_(request.tag),
      limit_(std::make_shared<TransferLimit>(getTimeout())),
      input_(sends() ? contiguous_source(request.tensor) : at::Tensor()),
      output_(sends() ? Output() : Output(request.tensor)),
      dtype_(dtype_of(request.tensor)),
      messages_(std::move(messages)) {
  set_sequence(request.sequence);
}

void TransferWork::start() {
  set_started();
  try {
    begin();
  } catch (...) {
    const auto error = std::current_exception();
    message_ended(error);
    if (error_type_of(error) == c10d::ErrorType::SUCCESS) rethrow();
  }
}

void TransferWork::begin() {
  // A send only reads this memory.
  post(sends() ? Span{const_cast<void*>(input_.const_data_ptr()), input_.nbytes()} : output_.span());
}

void TransferWork::post(Span memory) {
  const std::shared_ptr<PointToPoint> messages = messages_.lock();
  if (!messages) throw AbortedError("the process group is gone");
  const TransferDone done = [self = c10::intrusive_ptr<TransferWork>::reclaim_copy(this)](const Transfer& transfer) {
    self->source_.store(transfer.source());
    return self->message_ended(transfer.error());
  };
  std::shared_ptr<Transfer> transfer =
      sends() ? messages->send({memory.data, memory.bytes}, dtype_, peer_, tag_, limit_, done)
              : messages->recv(memory, dtype_, peer_, tag_, limit_, done);
  std::lock_guard<std::mutex> lock(transfer_mutex_);
  if (!this->done()) transfer_ = std::move(transfer);
}

TransferCallbacks TransferWork::message_ended(std::exception_ptr error) noexcept {
  if (!error && !sends()) {
    try {
      output_.commit();
    } catch (...) {
      error = std::current_exception();
    }
  }
  return end(error);
}

TransferCallbacks TransferWork::end(const std::exception_ptr& error) noexcept {
  const bool calls = complete(error);
  {
    // The transfer owns this Work through its callback: this breaks the cycle.
    std::lock_guard<std::mutex> lock(transfer_mutex_);
    transfer_.reset();
  }
  if (!calls) return nullptr;
  return [self = c10::intrusive_ptr<TransferWork>::reclaim_copy(this)] { self->run_callbacks(); };
}

c10::intrusive_ptr<c10::ivalue::Future> TransferWork::getFuture() {
  auto future = OursWork::getFuture();
  watch_future(*limit_);
  attend();
  return future;
}

void TransferWork::attend() const {
  if (done() || status().is_forked_child()) return;
  if (const std::shared_ptr<PointToPoint> messages = messages_.lock()) messages->attend();
}

bool TransferWork::wait(std::chrono::milliseconds timeout) {
  if (!done() && status().is_forked_child()) status().check_caller();  // or this would move the parent's messages
  if (!done() && timeout.count() <= 0) {
    limit_->start();
    std::shared_ptr<Transfer> transfer;
    {
      std::lock_guard<std::mutex> lock(transfer_mutex_);
      transfer = transfer_;
    }
    const std::shared_ptr<PointToPoint> messages = messages_.lock();
    if (transfer && messages) messages->wait(*transfer);
  }
  attend();
  // Even without a timeout, since the Work may end after its message, and on another thread.
  if (!await_done(timeout)) throw_wait_timeout(timeout);
  rethrow();
  return true;
}

}  // namespace ours
