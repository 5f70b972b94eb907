#include "support/calls.h"

namespace ours::testing {

void barrier(Group& group, uint64_t seq, std::chrono::milliseconds timeout) {
  group.barrier(call_of(Op::Barrier, DType::UInt8, seq, timeout));
}

void sum(Group& group, uint64_t seq, std::vector<float>& data, std::chrono::milliseconds timeout) {
  group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq, timeout), data.data(), data.data(), data.size(),
                   Reduction{ReduceKind::Sum, group.size(), 1.0});
}

float value(int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101); }

std::vector<float> values(int rank, size_t count) {
  std::vector<float> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = value(rank, i);
  return all;
}

std::vector<float> fractions(int rank, size_t count) {
  std::vector<float> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = fraction(rank, i);
  return all;
}

}  // namespace ours::testing
