#include <algorithm>

#include "collectives/call_checks.h"
#include "common/partition.h"
#include "cuda/nccl_group.h"

// What moves data unchanged: as bytes, so that all types go.

namespace ours::cuda {

void NcclGroup::broadcast(const Call& call, Span buffer, int root) {
  check_root(root, size());
  CallRecord record = record_of(call);
  record.root = root;
  record.count = buffer.bytes / size_of(call.dtype);
  run(call, {record}, [&] {
    if (buffer.bytes == 0) return;
    give(call, [&] { api_->broadcast(buffer.data, buffer.bytes, root, at_); });
  });
}

void NcclGroup::all_gather(const Call& call, ConstSpan input, const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  check_one_a_rank(call, outputs.size(), ranks);
  check_own(call, rank(), input.bytes, outputs[static_cast<size_t>(rank())].bytes);
  const std::vector<ConstSpan> sends(ranks, input);
  const bool even = std::all_of(outputs.begin(), outputs.end(), [&](Span s) { return s.bytes == input.bytes; });
  run(call, {record_of(call), table_of(sends, outputs, ranks)}, [&] {
    if (even && call.op == Op::AllGatherSingle) {  // all outputs are parts of one tensor
      if (input.bytes == 0) return;
      give(call, [&] { api_->all_gather(input.data, outputs[0].data, input.bytes, at_); });
    } else if (even) {
      gather_even(call, input, outputs);
    } else {
      exchange(call, sends, outputs);
    }
  });
}

/// Where the outputs lie, each rank knows for itself alone: all gather into the scratch memory, in the same steps.
void NcclGroup::gather_even(const Call& call, ConstSpan input, const std::vector<Span>& outputs) {
  const size_t step = std::max<size_t>(scratch_bytes_ / outputs.size(), 1);
  for (size_t k = 0; k < piece_count(input.bytes, step); ++k) {
    const Slice part = piece_of(input.bytes, step, k);
    std::byte* const gathered = scratch(call);
    give(call,
         [&] { api_->all_gather(static_cast<const std::byte*>(input.data) + part.begin, gathered, part.size(), at_); });
    for (size_t r = 0; r < outputs.size(); ++r) {
      copy(static_cast<std::byte*>(outputs[r].data) + part.begin, gathered + r * part.size(), part.size());
    }
  }
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
  run(call, {record, table_of(sends, receives, ranks)}, [&] { exchange(call, sends, receives); });
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
  run(call, {record, table_of(sends, receives, ranks)}, [&] { exchange(call, sends, receives); });
}

void NcclGroup::all_to_all(const Call& call, const std::vector<ConstSpan>& inputs, const std::vector<Span>& outputs) {
  const auto ranks = static_cast<size_t>(size());
  const auto me = static_cast<size_t>(rank());
  check_one_a_rank(call, inputs.size(), ranks);
  check_one_a_rank(call, outputs.size(), ranks);
  check_own(call, rank(), inputs[me].bytes, outputs[me].bytes);
  run(call, {record_of(call), table_of(inputs, outputs, ranks)}, [&] { exchange(call, inputs, outputs); });
}

/// One message from each rank to each, all at once; what a rank gives itself is copied.
void NcclGroup::exchange(const Call& call, const std::vector<ConstSpan>& sends, const std::vector<Span>& receives) {
  const auto me = static_cast<size_t>(rank());
  give_group(call, [&] {
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
