#include "backend/device/device_transfer_work.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <tuple>

#include "backend/device/device_transfers.h"

namespace ours {

DeviceTransferWork::DeviceTransferWork(const TransferRequest& request, const std::shared_ptr<PointToPoint>& messages,
                                       std::shared_ptr<GroupStatus> status,
                                       const std::shared_ptr<DeviceContext>& context,
                                       std::weak_ptr<DeviceTransfers> transfers)
    : TransferWork(request, messages, std::move(status)),
      device_(request.tensor.device()),
      transfers_(std::move(transfers)),
      order_(std::in_place, context, name_of(request.op), HostCall::Where::OnDevice) {}

void DeviceTransferWork::begin() {
  const auto bytes = static_cast<int64_t>(sends() ? input_.nbytes() : output_.span().bytes);
  // torch's allocator may allocate, or ask for its events, neither of which CUDA allows beside a capture.
  order_->context().accelerator().apart_from_captures(
      [&] { pinned_ = at::empty({bytes}, at::TensorOptions(at::kByte).pinned_memory(true)); });
  if (!sends()) return exchange();
  wait_for_device();
}

TransferCallbacks DeviceTransferWork::message_ended(std::exception_ptr error) noexcept {
  if (!error && !sends()) {
    try {
      wait_for_device();
      return nullptr;
    } catch (...) {
      error = std::current_exception();
    }
  }
  finish(error);
  return nullptr;
}

bool DeviceTransferWork::may_go_on(bool held_up) {
  if (!copied_) {
    if (!order_->reached()) {
      check_wait(false);
      return false;
    }
    copy();
  }
  const bool copied = copied_->reached();
  if (copied && !held_up) return true;
  check_wait(!copied);
  return false;
}

void DeviceTransferWork::check_wait(bool for_copy) {
  const std::string failure = order_->context().host().failure();
  if (!failure.empty()) throw AbortedError(failure);
  if (status().is_closed()) throw AbortedError("the process group was shut down with transfers under way");
  const auto late = [&] {
    const std::string what = for_copy ? std::string("the copy on the device for ") + name_of(op_)
                                      : std::string("the work on the device that ") + name_of(op_) + " comes after";
    return TimeoutError(what + " was not done within " + std::to_string(limit_->timeout().count()) +
                        " ms. Raise the timeout if that may take longer");
  };
  if (limit_->passed()) throw late();
  if (auto tell = limit_->take_late(false)) {
    call([tell = std::move(tell), error = std::make_exception_ptr(late())] { tell(error); });
  }
}

void DeviceTransferWork::copy() {
  DeviceContext& context = order_->context();
  Device& device = context.accelerator();
  const StreamHandle stream = sends() ? context.send_stream() : context.receive_stream();
  const Span host = span(pinned_);
  copied_ = device.make_event();
  if (sends()) {
    device.copy(host.data, input_.const_data_ptr(), host.bytes, stream);
  } else {
    device.copy(output_.span().data, host.data, host.bytes, stream);
    const c10::StreamGuard guard(context.torch_stream(stream));
    output_.commit();
  }
  copied_->record(stream);
}

void DeviceTransferWork::go_on(std::exception_ptr error) noexcept {
  if (!error && sends()) {
    try {
      return exchange();
    } catch (...) {
      error = std::current_exception();
    }
  } else if (error && copied_) {
    const std::tuple touched(pinned_, input_, output_);
    order_->context().release_after_failure(std::make_shared<std::decay_t<decltype(touched)>>(touched));
  }
  finish(error);
}

void DeviceTransferWork::exchange() {
  post(span(pinned_));
  attend();  // the host need not wait for it
}

void DeviceTransferWork::finish(const std::exception_ptr& error) noexcept {
  pinned_.reset();
  TransferCallbacks callbacks = end(error);
  if (!callbacks) return order_.reset();
  call([self = DeviceTransfers::WorkPtr::reclaim_copy(this), callbacks = std::move(callbacks)] {
    callbacks();
    self->order_.reset();
  });
}

void DeviceTransferWork::wait_for_device() {
  const std::shared_ptr<DeviceTransfers> transfers = transfers_.lock();
  if (!transfers) throw AbortedError("the process group is gone");
  transfers->add(DeviceTransfers::WorkPtr::reclaim_copy(this));
}

void DeviceTransferWork::call(TransferCallbacks callbacks) {
  const std::shared_ptr<DeviceTransfers> transfers = transfers_.lock();
  transfers ? transfers->call(std::move(callbacks)) : callbacks();
}

std::optional<DeviceTransferWork::Destination> DeviceTransferWork::destination() const {
  if (!sends()) return std::nullopt;
  return Destination(peer_, tag_);
}

void DeviceTransferWork::synchronize() {
  if (done()) return;
  limit_->start();
  await_done(kNoTimeout);
}

}  // namespace ours
