#include "backend/errors.h"
#include "backend/process_group.h"
#include "backend/profiling.h"

// Sends and receives. They are posted at once, whatever else is under way, so that no order of posting can deadlock.

namespace ours {

ProcessGroupOurs::WorkPtr ProcessGroupOurs::send(Tensors& tensors, int dst, int tag) {
  return post(Op::Send, tensors, dst, tag);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::recv(Tensors& tensors, int src, int tag) {
  return post(Op::Recv, tensors, src, tag);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::recvAnysource(Tensors& tensors, int tag) {
  return post(Op::RecvAnySource, tensors, kAnySource, tag);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::post(Op op, Tensors& tensors, int peer, int tag) {
  try {
    return start_transfer(op, tensors, peer, tag);
  } catch (const c10::ValueError& e) {
    throw_misuse(e);
  }
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::start_transfer(Op op, Tensors& tensors, int peer, int tag) {
  status_->check_usable();
  const char* const call = name_of(op);
  const at::Tensor& tensor = only(tensors, call, op == Op::Send ? "input" : "output");
  if (op == Op::Send) {
    check_dense(tensor, call, "the tensor");
  } else {
    check_output(tensor, call, "the tensor");
  }
  TORCH_CHECK_VALUE(op == Op::RecvAnySource || (peer >= 0 && peer < size_ && peer != rank_), call,
                    ": the peer is rank ", peer, ", but this is rank ", rank_, " of ", size_,
                    "; give another rank of the group");
  TORCH_CHECK_VALUE(tag >= 0, call, ": the tag is ", tag, "; tags are not negative");
  const uint64_t sequence = transfer_count_.fetch_add(1) + 1;
  const TensorLists outputs = op == Op::Send ? TensorLists() : TensorLists{tensors};
  const auto traced = [&] {
    return trace({op, sequence, options_->group_name, getGroupDesc(), rank_, size_, options_->global_ranks_in_group,
                  op == Op::Send ? tensors : Tensors(), outputs, peer},
                 status_->timeouts.get());
  };
  WorkPtr work;
  if (tensor.device().is_cpu()) {
    work = TransferWork::post({op, tensor, peer, tag, sequence, traced()}, rank_, point_to_point_, status_);
  } else {
    const TransferRequest request{op, tensor, peer, tag, sequence, std::nullopt};
    const auto on_device = with_torch_errors(status_->where(), [&] {
      // As launch() does for collectives.
      devices_->check_alive({op, dtype_of(tensor), sequence, Deadline::after(status_->timeouts.get())});
      return transfers_->make(request, rank_);
    });
    on_device->set_flight(traced());
    transfers_->start(on_device);
    work = on_device;
  }
  coalesce(work);
  return work;
}

}  // namespace ours
