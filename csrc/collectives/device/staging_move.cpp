#include <algorithm>

#include "collectives/call_checks.h"
#include "collectives/device/device_opening.h"
#include "collectives/device/staging_group.h"
#include "common/partition.h"

// What moves data unchanged, through the memory of the host. Each message is cut into pieces; step k is the host
// group's operation on all messages' pieces k, of which those of short ones are empty. So all ranks have to know how
// many steps the longest message takes: of a broadcast and an all_gather they do, for the others they tell each other.
//
// What a rank sends to itself stays on the device.

namespace ours {

void StagingGroup::broadcast(const Call& call, Span buffer, int root) {
  check_root(root, size());
  CallRecord record = record_of(call);
  record.root = root;
  record.count = buffer.bytes / size_of(call.dtype);
  auto* const data = static_cast<std::byte*>(buffer.data);
  const bool is_root = rank() == root;
  const auto piece = [&](size_t k) { return piece_of(buffer.bytes, chunk_bytes_, k); };
  StagingPipeline::Job job = job_of(call, record);
  job.steps = std::max<size_t>(piece_count(buffer.bytes, chunk_bytes_), 1);
  job.fetch = [&](size_t k, std::byte* slot, StreamHandle down) {
    if (is_root) copy(slot, data + piece(k).begin, piece(k).size(), down);
  };
  job.exchange = [&](size_t k, std::byte* slot) { host().broadcast(call, Span{slot, piece(k).size()}, root); };
  job.deliver = [&](size_t k, const std::byte* slot, StreamHandle up) {
    if (!is_root) copy(data + piece(k).begin, slot, piece(k).size(), up);
  };
  guarded(call, [&] {
    if (job.steps > 1) open_call(host(), call, record);
    pipeline_.run(job);
  });
}

void StagingGroup::all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  check_one_a_rank(call, outputs.size(), ranks);
  check_own(call, rank(), input.bytes, outputs[static_cast<size_t>(rank())].bytes);
  const CallRecord record = record_of(call);
  Exchange plan;
  plan.sends.assign(ranks, input);
  plan.receives = outputs;
  size_t most = 0;
  for (const Span& output : outputs) most = std::max(most, output.bytes);
  guarded(call, [&] {
    if (most > window_bytes()) agree_on_sizes(call, record, plan);
    exchange(call, record, plan, most, [&](const std::vector<ConstSpan>& ins, const std::vector<Span>& outs) {
      host().all_gather(call, ins[static_cast<size_t>(rank())], outs);
    });
  });
}

void StagingGroup::gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) {
  check_root(root, size());
  const auto ranks = static_cast<size_t>(size());
  const auto to = static_cast<size_t>(root);
  Exchange plan;
  plan.sends.resize(ranks);
  plan.sends[to] = input;
  if (rank() == root) {
    check_one_a_rank(call, outputs.size(), ranks);
    check_own(call, rank(), input.bytes, outputs[to].bytes);
    plan.receives = outputs;
  }
  CallRecord record = record_of(call);
  record.root = root;
  guarded(call, [&] {
    const size_t most = agree_on_sizes(call, record, plan);
    exchange(call, record, plan, most, [&](const std::vector<ConstSpan>& ins, const std::vector<Span>& outs) {
      host().gather(call, ins[to], outs, root);
    });
  });
}

void StagingGroup::scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) {
  check_root(root, size());
  const auto ranks = static_cast<size_t>(size());
  const auto from = static_cast<size_t>(root);
  Exchange plan;
  plan.common = false;
  plan.receives.resize(ranks);
  plan.receives[from] = output;
  if (rank() == root) {
    check_one_a_rank(call, inputs.size(), ranks);
    check_own(call, rank(), inputs[from].bytes, output.bytes);
    plan.sends = inputs;
  }
  CallRecord record = record_of(call);
  record.root = root;
  guarded(call, [&] {
    const size_t most = agree_on_sizes(call, record, plan);
    exchange(call, record, plan, most, [&](const std::vector<ConstSpan>& ins, const std::vector<Span>& outs) {
      host().scatter(call, ins, outs[from], root);
    });
  });
}

void StagingGroup::all_to_all(const Call& call, const std::vector<ConstSpan>& inputs,
                              const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  check_one_a_rank(call, inputs.size(), ranks);
  check_one_a_rank(call, outputs.size(), ranks);
  check_own(call, rank(), inputs[me].bytes, outputs[me].bytes);
  const Exchange plan{false, inputs, outputs};
  const CallRecord record = record_of(call);
  guarded(call, [&] {
    const size_t most = agree_on_sizes(call, record, plan);
    exchange(call, record, plan, most, [&](const std::vector<ConstSpan>& ins, const std::vector<Span>& outs) {
      host().all_to_all(call, ins, outs);
    });
  });
}

size_t StagingGroup::agree_on_sizes(const Call& call, const CallRecord& record, const Exchange& plan) {
  const Words mine = table_of(plan.sends, plan.receives, static_cast<size_t>(size()));
  const std::vector<Words> opened = open_call(host(), call, record, mine);
  return SizeTables(opened).check(record);
}

void StagingGroup::exchange(const Call& call, const CallRecord& record, const Exchange& plan, size_t most,
                            const HostExchange& on_host) {
  const auto me = static_cast<size_t>(rank());
  const size_t window = std::min(window_bytes(), most);
  // A slot has a window for each message that leaves (one for all of them if they are the same), and behind them one
  // for each that comes.
  const size_t leaving = plan.common ? 1 : plan.sends.size();
  const auto input = [&](std::byte* slot, size_t d, size_t k) {
    return ConstSpan{plan.common ? slot : slot + d * window, piece_of(plan.sends[d].bytes, window, k).size()};
  };
  const auto output = [&](std::byte* slot, size_t s, size_t k) {
    return Span{slot + (leaving + s) * window, piece_of(plan.receives[s].bytes, window, k).size()};
  };

  StagingPipeline::Job job = job_of(call, record);
  job.steps = window == 0 ? 1 : piece_count(most, window);
  job.fetch = [&](size_t k, std::byte* slot, StreamHandle down) {
    for (size_t d = 0; window != 0 && d < plan.sends.size(); ++d) {
      if (d == me || plan.sends[d].bytes == 0) continue;
      const Slice piece = piece_of(plan.sends[d].bytes, window, k);
      copy(plan.common ? slot : slot + d * window, static_cast<const std::byte*>(plan.sends[d].data) + piece.begin,
           piece.size(), down);
      if (plan.common) break;  // one copy serves all
    }
  };
  job.exchange = [&](size_t k, std::byte* slot) {
    std::vector<ConstSpan> ins;
    std::vector<Span> outs;
    ins.reserve(plan.sends.size());
    outs.reserve(plan.receives.size());
    for (size_t d = 0; d < plan.sends.size(); ++d) ins.push_back(window == 0 ? ConstSpan{} : input(slot, d, k));
    for (size_t s = 0; s < plan.receives.size(); ++s) outs.push_back(window == 0 ? Span{} : output(slot, s, k));
    // In the host group a rank has nothing for itself, or the same where it lies.
    if (!plan.sends.empty() && !plan.receives.empty()) {
      if (!plan.common) ins[me] = {};
      outs[me] = {const_cast<void*>(ins[me].data), ins[me].bytes};
    }
    on_host(ins, outs);
  };
  job.deliver = [&](size_t k, std::byte* slot, StreamHandle up) {
    const bool own = k == 0 && !plan.sends.empty() && !plan.receives.empty();
    if (own && plan.sends[me].data != plan.receives[me].data) {
      copy(plan.receives[me].data, plan.sends[me].data, plan.sends[me].bytes, up);
    }
    for (size_t s = 0; window != 0 && s < plan.receives.size(); ++s) {
      if (s == me) continue;
      const Slice piece = piece_of(plan.receives[s].bytes, window, k);
      copy(static_cast<std::byte*>(plan.receives[s].data) + piece.begin, output(slot, s, k).data, piece.size(), up);
    }
  };
  pipeline_.run(job);
}

}  // namespace ours
