#pragma once

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "collectives/op.h"

namespace ours {

/// The names of an operation in c10d, in profiles, and in traces.
struct OpFacts {
  c10d::OpType type;
  const char* title;        ///< of the event in profiles, such as "ours:all_reduce"
  const char* trace_name;   ///< in PyTorch's record_param_comms events
  const char* flight_name;  ///< in PyTorch's FlightRecorder, whose analyser knows these names
};

const OpFacts& op_facts(Op op);

/// A group, as records of its calls name it.
struct GroupNames {
  const std::string& name;
  const std::string& description;
  int rank;
  int size;
  const std::vector<uint64_t>& global_ranks;
};

/// A call, as record_param_comms and the FlightRecorder record it.
struct CallTrace {
  const GroupNames& group;
  Op op;
  uint64_t sequence;
  const std::vector<at::Tensor>& inputs;
  const std::vector<std::vector<at::Tensor>>& outputs;
  std::optional<int> peer;  ///< of a transfer; kAnySource for RecvAnySource
};

/// Tells PyTorch's profilers and execution-trace observers of a call. Costs almost nothing if there are none.
void record_call(const CallTrace& trace);

}  // namespace ours
