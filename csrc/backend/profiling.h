#pragma once

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "collectives/op.h"

namespace ours {

/// How the operation is called in c10d, in profiles, and in traces of communication.
struct OpFacts {
  c10d::OpType type;
  const char* title;        ///< of the event in profiles: "ours:all_reduce"
  const char* trace_name;   ///< in PyTorch's record_param_comms events
  const char* flight_name;  ///< in PyTorch's FlightRecorder, whose analyser knows what these calls do
};

const OpFacts& op_facts(Op op);

/// One call, for record_param_comms and the FlightRecorder.
struct CallTrace {
  Op op;
  uint64_t sequence;
  const std::string& group_name;
  const std::string& group_description;
  int rank;
  int size;
  const std::vector<uint64_t>& global_ranks;
  const std::vector<at::Tensor>& inputs;
  const std::vector<std::vector<at::Tensor>>& outputs;
  std::optional<int> peer;  ///< of a transfer; kAnySource for RecvAnySource
};

/// Tells PyTorch's profilers and execution-trace observers about a call. Costs next to nothing while there are none.
void record_call(const CallTrace& trace);

}  // namespace ours
