#include <algorithm>

#include "collectives/call_checks.h"
#include "cuda/nccl_group.h"

// What moves data unchanged: as bytes, so that all types go. The tables of sizes that open a call are the same on all
// ranks, and so is what follows from them.

namespace ours::cuda {

void NcclGroup::broadcast(const Call& call, Span buffer, int root) {
  check_root(root, size());
  CallRecord record = record_of(call);
  record.root = root;
  record.count = buffer.bytes / size_of(call.dtype);
  run(call, record, [&](const Running& run) {
    open_call(host(), call, record);
    if (buffer.bytes == 0) return;
    give(run, [&] { api_->broadcast(buffer.data, buffer.bytes, root, at_); });
  });
}

void NcclGroup::all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  check_one_a_rank(call, outputs.size(), ranks);
  check_own(call, rank(), input.bytes, outputs[static_cast<size_t>(rank())].bytes);
  const std::vector<ConstSpan> sends(ranks, input);
  const CallRecord record = record_of(call);
  bool in_one_piece = true;
  for (size_t r = 1; r < ranks; ++r) {
    const std::byte* place = static_cast<const std::byte*>(outputs[0].data) + r * outputs[0].bytes;
    in_one_piece = in_one_piece && outputs[r].bytes == outputs[0].bytes && outputs[r].data == place;
  }
  run(call, record, [&](const Running& run) {
    Words words{in_one_piece ? 1u : 0u};
    const Words table = table_of(sends, outputs, ranks);
    words.insert(words.end(), table.begin(), table.end());
    const auto opened = open_call(host(), call, record, words);
    SizeTables(opened).check(record);
    if (std::all_of(opened.begin(), opened.end(), [](const Words& told) { return told[0] == 1; })) {
      if (input.bytes == 0) return;
      give(run, [&] { api_->all_gather(input.data, outputs[0].data, input.bytes, at_); });
    } else {
      exchange(run, sends, outputs);
    }
  });
}

void NcclGroup::gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs, int root) {
  check_root(root, size());
  const auto ranks = static_cast<size_t>(size());
  std::vector<ConstSpan> sends(ranks);
  sends[static_cast<size_t>(root)] = input;
  if (rank() == root) {
    check_one_a_rank(call, outputs.size(), ranks);
    check_own(call, rank(), input.bytes, outputs[static_cast<size_t>(root)].bytes);
  }
  const std::vector<Span> receives = rank() == root ? outputs : std::vector<Span>(ranks);
  CallRecord record = record_of(call);
  record.root = root;
  run(call, record, [&](const Running& run) {
    const auto opened = open_call(host(), call, record, table_of(sends, receives, ranks));
    SizeTables(opened).check(record);
    exchange(run, sends, receives);
  });
}

void NcclGroup::scatter(const Call& call, const std::vector<ConstSpan>& inputs, Span output, int root) {
  check_root(root, size());
  const auto ranks = static_cast<size_t>(size());
  std::vector<Span> receives(ranks);
  receives[static_cast<size_t>(root)] = output;
  if (rank() == root) {
    check_one_a_rank(call, inputs.size(), ranks);
    check_own(call, rank(), inputs[static_cast<size_t>(root)].bytes, output.bytes);
  }
  const std::vector<ConstSpan> sends = rank() == root ? inputs : std::vector<ConstSpan>(ranks);
  CallRecord record = record_of(call);
  record.root = root;
  run(call, record, [&](const Running& run) {
    const auto opened = open_call(host(), call, record, table_of(sends, receives, ranks));
    SizeTables(opened).check(record);
    exchange(run, sends, receives);
  });
}

void NcclGroup::all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  check_one_a_rank(call, inputs.size(), ranks);
  check_one_a_rank(call, outputs.size(), ranks);
  check_own(call, rank(), inputs[me].bytes, outputs[me].bytes);
  const CallRecord record = record_of(call);
  run(call, record, [&](const Running& run) {
    const auto opened = open_call(host(), call, record, table_of(inputs, outputs, ranks));
    SizeTables(opened).check(record);
    exchange(run, inputs, outputs);
  });
}

/// One message from each rank to each, all at once; what a rank gives itself is copied.
void NcclGroup::exchange(const Running& run, const std::vector<ConstSpan>& sends, const std::vector<Span>& receives) {
  const auto me = static_cast<size_t>(rank());
  give_group(run, [&] {
    for (int peer = 0; peer < size(); ++peer) {
      const auto p = static_cast<size_t>(peer);
      if (p == me) continue;
      if (sends[p].bytes != 0) api_->send(sends[p].data, sends[p].bytes, peer, at_);
      if (receives[p].bytes != 0) api_->receive(receives[p].data, receives[p].bytes, peer, at_);
    }
  });
  copy(receives[me].data, sends[me].data, receives[me].bytes);
}

}  // namespace ours::cuda
