#include <algorithm>

#include "common/partition.h"
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
    if (buffer.bytes != 0) {
      give(run, [&] {
        invoke(nccl_->broadcast, buffer.data, buffer.data, buffer.bytes, kBytes, plan.root, comm(), stream());
      });
    }
    return;
  }
  claim(run, table_of(plan));
  const size_t bytes = plan.received(0);
  const bool even = std::all_of(plan.receives.begin(), plan.receives.end(),
                                [&](const auto& receive) { return receive && receive->bytes == bytes; });
  if (plan.movement != Movement::AllGather || !even) return exchange_directly(run, plan);
  if (run.call.op != Op::AllGatherSingle) return all_gather_even(run, plan);
  // All outputs are parts of one tensor.
  if (bytes == 0) return;
  give(run, [&] {
    invoke(nccl_->all_gather, plan.sends[0]->data, plan.receives[0]->data, bytes, kBytes, comm(), stream());
  });
}

/// Only the rank itself knows where its outputs lie, so all ranks gather into the scratch memory, in the same steps.
void NcclGroup::all_gather_even(const Running& run, const ExchangePlan& plan) {
  refuse_capture(run);
  const ConstSpan& input = *plan.sends[0];
  const size_t step = std::max<size_t>(scratch_bytes_ / plan.receives.size(), 1);
  for (size_t k = 0; k < piece_count(input.bytes, step); ++k) {
    const Slice part = piece_of(input.bytes, step, k);
    const std::byte* const mine = static_cast<const std::byte*>(input.data) + part.begin;
    give(run, [&] { invoke(nccl_->all_gather, mine, scratch(), part.size(), kBytes, comm(), stream()); });
    for (size_t r = 0; r < plan.receives.size(); ++r) {
      copy(static_cast<std::byte*>(plan.receives[r]->data) + part.begin, scratch() + r * part.size(), part.size());
    }
  }
}

/// Sends one message from each rank to each, all at once; a rank copies what it sends to itself.
void NcclGroup::exchange_directly(const Running& run, const ExchangePlan& plan) {
  const auto me = static_cast<size_t>(rank());
  give_group(run, [&] {
    for (int peer = 0; peer < size(); ++peer) {
      const auto p = static_cast<size_t>(peer);
      if (p == me) continue;
      if (plan.sent(p) != 0) invoke(nccl_->send, plan.sends[p]->data, plan.sent(p), kBytes, peer, comm(), stream());
      if (plan.received(p) == 0) continue;
      invoke(nccl_->receive, plan.receives[p]->data, plan.received(p), kBytes, peer, comm(), stream());
    }
  });
  if (plan.sends[me] && plan.receives[me]) copy(plan.receives[me]->data, plan.sends[me]->data, plan.sent(me));
}

}  // namespace ours::cuda
