#include "collectives/op.h"

namespace ours {

const char* name_of(Op op) {
  switch (op) {
    case Op::Barrier:
      return "barrier";
    case Op::AllReduce:
      return "all_reduce";
    case Op::AllReduceCoalesced:
      return "all_reduce_coalesced";
    case Op::AllReduceSparse:
      return "all_reduce (sparse)";
    case Op::Reduce:
      return "reduce";
    case Op::ReduceScatter:
      return "reduce_scatter";
    case Op::ReduceScatterSingle:
      return "reduce_scatter_tensor";
    case Op::ReduceScatterCoalesced:
      return "reduce_scatter_tensor_coalesced";
    case Op::Broadcast:
      return "broadcast";
    case Op::AllGather:
      return "all_gather";
    case Op::AllGatherSingle:
      return "all_gather_into_tensor";
    case Op::AllGatherCoalesced:
      return "all_gather_into_tensor_coalesced";
    case Op::Gather:
      return "gather";
    case Op::GatherSingle:
      return "gather_single";
    case Op::Scatter:
      return "scatter";
    case Op::AllToAll:
      return "all_to_all";
    case Op::AllToAllSingle:
      return "all_to_all_single";
    case Op::MonitoredBarrier:
      return "monitored_barrier";
    case Op::Send:
      return "send";
    case Op::Recv:
      return "recv";
    case Op::RecvAnySource:
      return "recv (from any source)";
  }
  // A value that came over the network may be outside the enum.
  return "unknown operation";
}

}  // namespace ours
