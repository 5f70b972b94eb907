#include <algorithm>

#include "cuda/nccl_group.h"

// What moves data unchanged: as bytes, so that all types go. The tables of sizes that open a call are the same on all
// ranks, and so is what follows from them.

namespace ours::cuda {

void NcclGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  if (plan.movement == Movement::Broadcast) {
    open_call(host(), run);
    const Span& buffer = plan.buffer();
    if (buffer.bytes != 0) give(run, [&] { api_->broadcast(buffer.data, buffer.bytes, plan.root, at_); });
    return;
  }
  if (plan.movement != Movement::AllGather) {
    const auto opened = open_call(host(), run, table_of(plan));
    SizeTables(opened).check(run.record);
    return exchange_directly(run, plan);
  }
  const Span& first = *plan.receives[0];
  bool in_one_piece = true;
  for (size_t r = 1; r < plan.receives.size(); ++r) {
    const std::byte* place = static_cast<const std::byte*>(first.data) + r * first.bytes;
    in_one_piece = in_one_piece && plan.received(r) == first.bytes && plan.receives[r]->data == place;
  }
  Words words{in_one_piece ? 1u : 0u};
  const Words table = table_of(plan);
  words.insert(words.end(), table.begin(), table.end());
  const auto opened = open_call(host(), run, words);
  SizeTables(opened).check(run.record);
  if (!std::all_of(opened.begin(), opened.end(), [](const Words& told) { return told[0] == 1; })) {
    return exchange_directly(run, plan);
  }
  const ConstSpan& input = *plan.sends[0];
  if (input.bytes != 0) give(run, [&] { api_->all_gather(input.data, first.data, input.bytes, at_); });
}

/// One message from each rank to each, all at once; what a rank gives itself is copied.
void NcclGroup::exchange_directly(const Running& run, const ExchangePlan& plan) {
  const auto me = static_cast<size_t>(rank());
  give_group(run, [&] {
    for (int peer = 0; peer < size(); ++peer) {
      const auto p = static_cast<size_t>(peer);
      if (p == me) continue;
      if (plan.sent(p) != 0) api_->send(plan.sends[p]->data, plan.sent(p), peer, at_);
      if (plan.received(p) != 0) api_->receive(plan.receives[p]->data, plan.received(p), peer, at_);
    }
  });
  if (plan.sends[me] && plan.receives[me]) copy(plan.receives[me]->data, plan.sends[me]->data, plan.sent(me));
}

}  // namespace ours::cuda
