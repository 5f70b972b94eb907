#include "backend/profiling.h"

#include <ATen/record_function.h>

#include <iterator>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>

namespace ours {

const OpFacts& op_facts(Op op) {
  using c10d::OpType;
  // In the order of Op. The titles are those that PyTorch's tools look for after a backend's name.
  static constexpr OpFacts kFacts[] = {
      {OpType::BARRIER, "ours:barrier", "barrier", "ours:barrier"},
      {OpType::ALLREDUCE, "ours:all_reduce", "allreduce", "ours:all_reduce"},
      {OpType::ALLREDUCE_COALESCED, "ours:all_reduce", "allreduce_coalesced", "ours:allreduce_coalesced"},
      {OpType::_ALLREDUCE_SPARSE, "ours:sparse_all_reduce", "allreduce_sparse", "ours:all_reduce"},
      {OpType::REDUCE, "ours:reduce", "reduce", "ours:reduce"},
      {OpType::REDUCE_SCATTER, "ours:reduce_scatter", "reduce_scatter", "ours:reduce_scatter"},
      {OpType::_REDUCE_SCATTER_BASE, "ours:reduce_scatter", "_reduce_scatter_base", "ours:_reduce_scatter_base"},
      {OpType::COALESCED, "ours:reduce_scatter", "reduce_scatter_tensor_coalesced",
       "ours:reduce_scatter_tensor_coalesced"},
      {OpType::BROADCAST, "ours:broadcast", "broadcast", "ours:broadcast"},
      {OpType::ALLGATHER, "ours:all_gather", "all_gather", "ours:all_gather"},
      {OpType::_ALLGATHER_BASE, "ours:all_gather", "_allgather_base", "ours:_all_gather_base"},
      {OpType::ALLGATHER_COALESCED, "ours:all_gather", "allgather_into_tensor_coalesced",
       "ours:all_gather_into_tensor_coalesced"},
      {OpType::GATHER, "ours:gather", "gather", "ours:gather"},
      {OpType::GATHER, "ours:gather", "gather_into_tensor", "ours:gather"},
      {OpType::SCATTER, "ours:scatter", "scatter", "ours:scatter"},
      {OpType::ALLTOALL, "ours:all_to_all", "all_to_all", "ours:all_to_all"},
      {OpType::ALLTOALL_BASE, "ours:all_to_all", "all_to_allv", "ours:all_to_all_single"},
      {OpType::BARRIER, "ours:monitored_barrier", "monitored_barrier", "ours:barrier"},
      {OpType::SEND, "ours:send", "send", "ours:send"},
      {OpType::RECV, "ours:recv", "recv", "ours:recv"},
      {OpType::RECVANYSOURCE, "ours:recvAnySource", "recv_any_source", "ours:recv"},
      // These two are no calls of a process group, and never recorded.
      {OpType::UNKNOWN, "ours:rendezvous", "symmetric_rendezvous", "ours:rendezvous"},
      {OpType::UNKNOWN, "ours:window", "window_registration", "ours:window"},
  };
  static_assert(std::size(kFacts) == kOps, "every Op has a row");
  return kFacts[static_cast<size_t>(op)];
}

namespace {

int64_t elements(const std::vector<at::Tensor>& tensors) {
  int64_t sum = 0;
  for (const auto& tensor : tensors) sum += tensor.numel();
  return sum;
}

/// The first global rank, and the distance between neighbours; 0 if that varies.
std::pair<int, int> start_and_stride(const std::vector<uint64_t>& ranks) {
  if (ranks.empty()) return {0, 1};
  const auto start = static_cast<int>(ranks.front());
  if (ranks.size() == 1) return {start, 1};
  const auto stride = static_cast<int64_t>(ranks[1]) - static_cast<int64_t>(ranks[0]);
  for (size_t i = 2; i < ranks.size(); ++i) {
    if (static_cast<int64_t>(ranks[i]) - static_cast<int64_t>(ranks[i - 1]) != stride) return {start, 0};
  }
  return {start, static_cast<int>(stride)};
}

}  // namespace

void record_call(const CallTrace& trace) {
  if (!at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) return;
  const auto [start, stride] = start_and_stride(trace.group.global_ranks);
  std::vector<at::Tensor> outputs;
  for (const auto& list : trace.outputs) outputs.insert(outputs.end(), list.begin(), list.end());
  const at::ScalarType dtype = !trace.inputs.empty() ? trace.inputs.front().scalar_type()
                               : !outputs.empty()    ? outputs.front().scalar_type()
                                                     : at::kByte;
  const auto name = std::make_tuple(trace.group.name, trace.group.description);
  const auto sequence = std::make_tuple(static_cast<int64_t>(trace.sequence), c10d::isP2POp(op_facts(trace.op).type));
  RECORD_PARAM_COMMS_DATA(sequence, name, trace.inputs, outputs, trace.group.rank, op_facts(trace.op).trace_name,
                          elements(trace.inputs), elements(outputs), dtype, std::vector<int64_t>(),
                          std::vector<int64_t>(), start, stride, trace.group.size);
}

}  // namespace ours
