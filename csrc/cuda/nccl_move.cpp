#include "cuda/nccl_group.h"

// The collectives that move data unchanged. Data is sent as bytes, so all types work.

namespace ours::cuda {
namespace {

constexpr NcclType kBytes = NcclType::UInt8;

}  // namespace

void NcclGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  if (plan.movement == Movement::Broadcast) {
    claim(run);
    const Span& buffer = plan.buffer();
    return give(run, [&] { broadcast(buffer.data, buffer, plan.root); });
  }
  claim(run, table_of(plan));
  if (plan.movement != Movement::AllGather) return exchange_directly(run, plan);
  const ConstSpan& input = *plan.sends[0];
  give(run, [&] {
    if (run.call.op == Op::AllGatherSingle && input.bytes != 0) {  // all outputs are equal parts of one tensor
      return invoke(nccl_->all_gather, input.data, plan.receives[0]->data, input.bytes, kBytes, comm(), stream());
    }
    for (int root = 0; root < size(); ++root) {
      broadcast(input.data, *plan.receives[static_cast<size_t>(root)], root);
    }
  });
}

/// `from` only counts on the root.
void NcclGroup::broadcast(const void* from, const Span& to, int root) {
  if (to.bytes == 0) return;
  invoke(nccl_->broadcast, root == rank() ? from : to.data, to.data, to.bytes, kBytes, root, comm(), stream());
}

/// Sends one message from each rank to each, all at once; a rank copies what it sends to itself.
void NcclGroup::exchange_directly(const Running& run, const ExchangePlan& plan) {
  const auto me = static_cast<size_t>(rank());
  give(run, [&] {
    for (int peer = 0; peer < size(); ++peer) {
      const auto p = static_cast<size_t>(peer);
      if (p == me) continue;
      if (plan.sent(p) != 0) invoke(nccl_->send, plan.sends[p]->data, plan.sent(p), kBytes, peer, comm(), stream());
      if (plan.received(p) == 0) continue;
      invoke(nccl_->receive, plan.receives[p]->data, plan.received(p), kBytes, peer, comm(), stream());
    }
  });
  if (!plan.sends[me] || !plan.receives[me] || plan.sent(me) == 0) return;
  if (plan.receives[me]->data == plan.sends[me]->data) return;
  device().copy(plan.receives[me]->data, plan.sends[me]->data, plan.sent(me), stream());
}

}  // namespace ours::cuda
