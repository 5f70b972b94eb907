#pragma once

#include <cstddef>
#include <cstdint>

namespace ours {

/// The operation that a rank called, as it travels in records and appears in messages (the values are protocol).
enum class Op : uint8_t {
  Barrier,
  AllReduce,
  AllReduceCoalesced,
  AllReduceSparse,
  Reduce,
  ReduceScatter,
  ReduceScatterSingle,
  ReduceScatterCoalesced,
  Broadcast,
  AllGather,
  AllGatherSingle,
  AllGatherCoalesced,
  Gather,
  GatherSingle,
  Scatter,
  AllToAll,
  AllToAllSingle,
  MonitoredBarrier,
  Send,
  Recv,
  RecvAnySource,
  SymmetricRendezvous,
  WindowRegistration,
  Last = WindowRegistration
};

constexpr size_t kOps = static_cast<size_t>(Op::Last) + 1;

/// The call in messages, by torch.distributed's name where it has one: "all_reduce".
const char* name_of(Op op);

}  // namespace ours
