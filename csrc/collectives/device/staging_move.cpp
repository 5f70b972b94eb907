#include <algorithm>

#include "collectives/device/device_opening.h"
#include "collectives/device/staging_group.h"
#include "common/partition.h"

// The collectives that move data unchanged, through the memory of the host. Each message is cut into pieces; step k
// is the host group's operation on the pieces k of all messages, which are empty for short messages. So all ranks
// must know how many steps the longest message takes. For a broadcast and an all_gather they know; for the others
// they tell each other.
//
// What a rank sends to itself stays on the device.

namespace ours {

void StagingGroup::do_exchange(const Running& run, const ExchangePlan& plan) {
  if (plan.movement == Movement::Broadcast) return broadcast_chunks(run, plan);
  if (plan.movement != Movement::AllGather) return exchange_windows(run, plan, agree_on_sizes(run, plan));
  size_t most = 0;
  for (size_t r = 0; r < plan.receives.size(); ++r) most = std::max(most, plan.received(r));
  if (most > window_bytes()) agree_on_sizes(run, plan);
  exchange_windows(run, plan, most);
}

void StagingGroup::broadcast_chunks(const Running& run, const ExchangePlan& plan) {
  const Call& call = run.call;
  const Span buffer = plan.buffer();
  const int root = plan.root;
  auto* const data = static_cast<std::byte*>(buffer.data);
  const bool is_root = rank() == root;
  const auto piece = [&](size_t k) { return piece_of(buffer.bytes, chunk_bytes_, k); };
  StagingPipeline::Job job = job_of(run);
  job.steps = std::max<size_t>(piece_count(buffer.bytes, chunk_bytes_), 1);
  job.fetch = [&](size_t k, std::byte* slot, StreamHandle down) {
    if (is_root) copy(slot, data + piece(k).begin, piece(k).size(), down);
  };
  job.exchange = [&](size_t k, std::byte* slot) { host().broadcast(call, Span{slot, piece(k).size()}, root); };
  job.deliver = [&](size_t k, const std::byte* slot, StreamHandle up) {
    if (!is_root) copy(data + piece(k).begin, slot, piece(k).size(), up);
  };
  if (job.steps > 1) open_call(host(), run);
  pipeline_.run(job);
}

size_t StagingGroup::agree_on_sizes(const Running& run, const ExchangePlan& plan) {
  return SizeTables(open_call(host(), run, table_of(plan))).check(run.record);
}

void StagingGroup::exchange_windows(const Running& run, const ExchangePlan& plan, size_t most) {
  const size_t ranks = plan.sends.size();
  const auto me = static_cast<size_t>(rank());
  const size_t window = std::min(window_bytes(), most);
  // A slot has a window for each outgoing message (a single one if they are all the same), followed by one for each
  // incoming message.
  const size_t leaving = plan.is_common() ? 1 : ranks;
  const auto input = [&](std::byte* slot, size_t d, size_t k) {
    return ConstSpan{plan.is_common() ? slot : slot + d * window, piece_of(plan.sent(d), window, k).size()};
  };
  const auto output = [&](std::byte* slot, size_t s, size_t k) {
    return Span{slot + (leaving + s) * window, piece_of(plan.received(s), window, k).size()};
  };

  StagingPipeline::Job job = job_of(run);
  job.steps = window == 0 ? 1 : piece_count(most, window);
  job.fetch = [&](size_t k, std::byte* slot, StreamHandle down) {
    for (size_t d = 0; window != 0 && d < ranks; ++d) {
      if (d == me || plan.sent(d) == 0) continue;
      const Slice piece = piece_of(plan.sent(d), window, k);
      copy(plan.is_common() ? slot : slot + d * window,
           static_cast<const std::byte*>(plan.sends[d]->data) + piece.begin, piece.size(), down);
      if (plan.is_common()) break;  // one copy serves all
    }
  };
  job.exchange = [&](size_t k, std::byte* slot) {
    ExchangePlan step = plan;
    for (size_t r = 0; r < ranks; ++r) {
      if (step.sends[r]) step.sends[r] = window == 0 ? ConstSpan{} : input(slot, r, k);
      if (step.receives[r]) step.receives[r] = window == 0 ? Span{} : output(slot, r, k);
    }
    // In the host group, a rank sends itself nothing, or leaves it where it lies.
    if (step.sends[me] && step.receives[me]) {
      if (!plan.is_common()) step.sends[me] = ConstSpan{};
      step.receives[me] = Span{const_cast<void*>(step.sends[me]->data), step.sends[me]->bytes};
    }
    host().exchange(run.call, step);
  };
  job.deliver = [&](size_t k, std::byte* slot, StreamHandle up) {
    const bool own = k == 0 && plan.sends[me] && plan.receives[me];
    if (own && plan.sends[me]->data != plan.receives[me]->data) {
      copy(plan.receives[me]->data, plan.sends[me]->data, plan.sent(me), up);
    }
    for (size_t s = 0; window != 0 && s < ranks; ++s) {
      if (s == me || !plan.receives[s]) continue;
      const Slice piece = piece_of(plan.received(s), window, k);
      copy(static_cast<std::byte*>(plan.receives[s]->data) + piece.begin, output(slot, s, k).data, piece.size(), up);
    }
  };
  pipeline_.run(job);
}

}  // namespace ours
