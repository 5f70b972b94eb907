#include <algorithm>
#include <random>

#include "support/groups.h"

// Long sequences of all operations, with sizes, roots and pauses drawn at random: one call must not disturb the next,
// however far the ranks drift apart.

namespace ours {
namespace {

using testing::call_of;

/// The element `i` of what `rank` gives in call `seq`.
int value(uint64_t seq, int rank, size_t i) {
  return static_cast<int>(seq * 131 + i * 7 + static_cast<size_t>(rank) * 17);
}

std::vector<int> values(uint64_t seq, int rank, size_t count) {
  std::vector<int> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = value(seq, rank, i);
  return all;
}

Span span(std::vector<int>& v) { return {v.data(), v.size() * sizeof(int)}; }
ConstSpan const_span(const std::vector<int>& v) { return {v.data(), v.size() * sizeof(int)}; }

void check_reduction(Group& group, Call call, size_t count, int root) {
  std::vector<int> data = values(call.seq, group.rank(), count);
  const Reduction sum{ReduceKind::Sum, group.size(), 1.0};
  if (root < 0) {
    group.all_reduce(call, data.data(), data.data(), count, sum);
  } else {
    call.op = Op::Reduce;
    group.reduce(call, data.data(), data.data(), count, sum, root);
  }
  if (root >= 0 && root != group.rank()) return;
  for (size_t i = 0; i < count; ++i) {
    int expected = 0;
    for (int r = 0; r < group.size(); ++r) expected += value(call.seq, r, i);
    CHECK_EQ(data[i], expected);
  }
}

void check_movement(Group& group, Call call, size_t count, int root) {
  call.op = Op::Broadcast;
  std::vector<int> data = values(call.seq, root, group.rank() == root ? count : 0);
  data.resize(count);
  group.broadcast(call, span(data), root);
  CHECK(data == values(call.seq, root, count));
}

void check_gathering(Group& group, Call call, size_t count, int root) {
  call.op = root < 0 ? Op::AllGather : Op::Gather;
  const bool reads = root < 0 || root == group.rank();
  std::vector<std::vector<int>> parts(reads ? static_cast<size_t>(group.size()) : 0);
  std::vector<Span> outputs;
  for (size_t r = 0; r < parts.size(); ++r) {
    parts[r].resize(count / (r + 1));
    outputs.push_back(span(parts[r]));
  }
  const auto mine = values(call.seq, group.rank(), count / static_cast<size_t>(group.rank() + 1));
  if (root < 0) {
    group.all_gather(call, const_span(mine), outputs);
  } else {
    group.gather(call, const_span(mine), outputs, root);
  }
  for (size_t r = 0; r < parts.size(); ++r) CHECK(parts[r] == values(call.seq, static_cast<int>(r), parts[r].size()));
}

void run_calls(Group& group, int calls) {
  std::mt19937 common(7);  // the same on all ranks
  std::mt19937 own(static_cast<unsigned>(group.rank()));
  for (int i = 0; i < calls; ++i) {
    const auto kind = common() % 6;
    const size_t count = common() % 4 == 0 ? common() % 60000 : common() % 600;
    const int root = static_cast<int>(common() % static_cast<unsigned>(group.size()));
    const Call call = call_of(Op::AllReduce, DType::Int32, static_cast<uint64_t>(i));
    if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 2000));
    if (kind == 0) check_reduction(group, call, count, -1);
    if (kind == 1) check_reduction(group, call, count, root);
    if (kind == 2) check_movement(group, call, count, root);
    if (kind == 3) check_gathering(group, call, count, -1);
    if (kind == 4) check_gathering(group, call, count, root);
    if (kind == 5) group.barrier(call_of(Op::Barrier, DType::UInt8, call.seq));
  }
}

TEST(long_sequences_of_calls_over_tcp_give_what_they_should) {
  for (const auto& kind : {testing::tcp_kind("direct", 2, false), testing::tcp_kind("ring", 1, true)}) {
    for (const int ranks : {2, 5}) {
      testing::run_groups(kind, ranks, 4096, [](Group& group) { run_calls(group, 120); });
    }
  }
}

}  // namespace
}  // namespace ours
