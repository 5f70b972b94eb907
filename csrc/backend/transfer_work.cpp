#include "backend/transfer_work.h"

#include "backend/errors.h"

namespace ours {

TransferWork::TransferWork(const TransferRequest& request, int rank, std::weak_ptr<PointToPoint> p2p,
                           std::shared_ptr<GroupStatus> status)
    : OursWork(request.op, rank, std::move(status), {request.tensor},
               request.op == Op::Send ? Outputs{} : Outputs{{request.tensor}}, std::chrono::milliseconds(-1)),
      limit_(std::make_shared<TransferLimit>(getTimeout())),
      p2p_(std::move(p2p)) {
  set_sequence(request.sequence);
  set_flight(request.flight);
  if (request.op == Op::Send) {
    input_ = contiguous_source(request.tensor);
  } else {
    output_ = Output(request.tensor);
  }
}

c10::intrusive_ptr<TransferWork> TransferWork::post(const TransferRequest& request, int rank,
                                                    const std::shared_ptr<PointToPoint>& p2p,
                                                    const std::shared_ptr<GroupStatus>& status) {
  const DType dtype = dtype_of(request.tensor);
  auto work = c10::make_intrusive<TransferWork>(request, rank, p2p, status);
  work->set_started();
  const TransferDone done = [work](const Transfer& transfer) { return work->end(transfer); };
  std::shared_ptr<Transfer> transfer;
  try {
    transfer = request.op == Op::Send
                   ? p2p->send(const_span(work->input_), dtype, request.peer, request.tag, work->limit_, done)
                   : p2p->recv(work->output_.span(), dtype, request.peer, request.tag, work->limit_, done);
  } catch (...) {
    const auto error = std::current_exception();
    work->complete(error);
    work->run_callbacks();
    if (error_type_of(error) == c10d::ErrorType::SUCCESS) work->rethrow();
    return work;
  }
  std::lock_guard<std::mutex> lock(work->transfer_mutex_);
  if (!work->done()) work->transfer_ = std::move(transfer);
  return work;
}

TransferCallbacks TransferWork::end(const Transfer& transfer) noexcept {
  std::exception_ptr error = transfer.error();
  source_.store(transfer.source());
  if (!error && op_ != Op::Send) {
    try {
      output_.commit();
    } catch (...) {
      error = std::current_exception();
    }
  }
  complete(error);
  {
    // The transfer owns this Work through its callback: this breaks the cycle.
    std::lock_guard<std::mutex> lock(transfer_mutex_);
    transfer_.reset();
  }
  if (!has_callbacks()) return nullptr;
  return [self = c10::intrusive_ptr<TransferWork>::reclaim_copy(this)] { self->run_callbacks(); };
}

c10::intrusive_ptr<c10::ivalue::Future> TransferWork::getFuture() {
  auto future = OursWork::getFuture();
  watch_future(*limit_);
  return future;
}

bool TransferWork::wait(std::chrono::milliseconds timeout) {
  if (!done() && timeout.count() <= 0) {
    std::shared_ptr<Transfer> transfer;
    {
      std::lock_guard<std::mutex> lock(transfer_mutex_);
      transfer = transfer_;
    }
    const std::shared_ptr<PointToPoint> p2p = p2p_.lock();
    if (transfer && p2p) p2p->wait(*transfer);
  }
  // Even without a timeout, since another thread may have finished the transfer and not yet called end().
  if (!await_done(timeout)) throw_wait_timeout(timeout);
  rethrow();
  return true;
}

}  // namespace ours
