#include <atomic>
#include <random>
#include <thread>

#include "support/contract.h"

// The contract of Group for calls one after another: none disturbs the next, and no rank holds up another that has all
// it needs.

namespace ours::testing {
namespace {

/// Makes a call of one of the kinds 0 to 8, with other data for each `seq`. If there is something to do in between, and
/// the group can begin calls, makes it in two parts.
void call_in_turn(Group& group, int which, uint64_t seq, size_t count, int root,
                  const std::function<void()>& between = nullptr) {
  const auto make = [&](Op op, const auto& operation) {
    Call call = call_of(op, op == Op::Barrier ? DType::UInt8 : DType::Float32, seq);
    if (between && group.can_begin()) {
      call.part = Part::Beginning;
      CHECK(!operation(call));
      between();
      call.part = Part::Whole;
    }
    CHECK(operation(call));
  };
  const int me = group.rank();
  const auto given = [&](int rank) { return values(rank + static_cast<int>(seq), count); };
  const Reduction summing{ReduceKind::Sum, group.size(), 1.0};
  const auto check_sum = [&](const std::vector<float>& data, int first) {
    for (size_t i = 0; i < count; ++i) {
      float expected = 0;
      for (int r = 0; r < group.size(); ++r) expected += value(first + r + static_cast<int>(seq), i);
      CHECK_EQ(data[i], expected);
    }
  };
  std::vector<float> data = given(me);
  // For the ranks, and from them.
  std::vector<std::vector<float>> parts;
  std::vector<std::vector<float>> got(static_cast<size_t>(group.size()), std::vector<float>(count));
  std::vector<ConstSpan> inputs;
  std::vector<Span> outputs;
  for (int r = 0; r < group.size(); ++r) parts.push_back(given(me + r));
  for (auto& part : parts) inputs.push_back(const_span(part));
  for (auto& part : got) outputs.push_back(span(part));
  switch (which) {
    case 0:
      return make(Op::Barrier, [&](const Call& call) { return group.barrier(call); });
    case 1:
      make(Op::Broadcast, [&](const Call& call) { return group.broadcast(call, span(data), root); });
      CHECK(data == given(root));
      return;
    case 2:
      make(Op::AllReduce,
           [&](const Call& call) { return group.all_reduce(call, data.data(), data.data(), count, summing); });
      return check_sum(data, 0);
    case 3:
      make(Op::Reduce,
           [&](const Call& call) { return group.reduce(call, data.data(), data.data(), count, summing, root); });
      if (me == root) check_sum(data, 0);
      return;
    case 4:
      make(Op::AllGather, [&](const Call& call) { return group.all_gather(call, const_span(data), outputs); });
      for (int r = 0; r < group.size(); ++r) CHECK(got[static_cast<size_t>(r)] == given(r));
      return;
    case 5:
      make(Op::Gather, [&](const Call& call) { return group.gather(call, const_span(data), outputs, root); });
      for (int r = 0; me == root && r < group.size(); ++r) CHECK(got[static_cast<size_t>(r)] == given(r));
      return;
    case 6:
      make(Op::Scatter, [&](const Call& call) { return group.scatter(call, inputs, span(data), root); });
      CHECK(data == given(root + me));
      return;
    case 7:
      make(Op::AllToAll, [&](const Call& call) { return group.all_to_all(call, inputs, outputs); });
      for (int r = 0; r < group.size(); ++r) CHECK(got[static_cast<size_t>(r)] == given(r + me));
      return;
    default: {
      std::vector<const void*> sources;
      for (const ConstSpan& part : inputs) sources.push_back(part.data);
      const std::vector<size_t> counts(sources.size(), count);
      make(Op::ReduceScatter,
           [&](const Call& call) { return group.reduce_scatter(call, sources, counts, data.data(), summing); });
      check_sum(data, me);
    }
  }
}

constexpr int kKindsOfCalls = 9;

// One call must not disturb the next, however far the ranks drift apart.
CONTRACT(long_sequences_of_calls_give_what_they_should) {
  run_groups(kind, kind.many_threads ? 3 : 5, 4096, [&](Group& group) {
    std::mt19937 common(7);  // the same on all ranks
    std::mt19937 own(static_cast<unsigned>(group.rank()));
    for (uint64_t seq = 0; seq < 100; ++seq) {
      const auto which = static_cast<int>(common() % kKindsOfCalls);
      const size_t count = common() % 4 == 0 ? common() % 20000 : common() % 600;
      const int root = static_cast<int>(common() % static_cast<unsigned>(group.size()));
      if (own() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 2000));
      call_in_turn(group, which, seq, count, root, own() % 2 == 0 ? [] {} : std::function<void()>());
    }
  });
}

CONTRACT(peers_do_not_wait_for_the_rest_of_what_has_begun) {
  for (int which = 0; which < kKindsOfCalls; ++which) {
    constexpr int kRanks = 3;
    std::atomic<int> ended{0};
    std::atomic<int> begun{0};
    run_groups(kind, kRanks, 0, [&](Group& group) {
      for (int seq = 0; seq < kRanks; ++seq) {
        // One rank comes for the rest when all others have their results.
        const auto rest = [&] {
          if (!group.has_begun()) return;
          ++begun;
          if (seq != group.rank()) return;
          wait_until([&] { return ended >= (seq + 1) * (kRanks - 1); });
          CHECK(group.have_all_begun());
        };
        call_in_turn(group, which, static_cast<uint64_t>(seq), 100, 1, rest);
        if (seq != group.rank()) ++ended;
      }
    });
    if (kind.name.rfind("shared memory", 0) == 0) CHECK_EQ(begun, kRanks * kRanks);
  }
}

// A rank that is done may not touch the group again for long, so no other rank may depend on it.
CONTRACT(a_rank_that_is_done_with_a_call_holds_up_nobody) {
  for (int which = 0; which < kKindsOfCalls; ++which) {
    constexpr int kRanks = 4;
    std::atomic<int> done{0};
    run_groups(kind, kRanks, 4096, [&](Group& group) {
      for (int seq = 1; seq <= 3; ++seq) {
        call_in_turn(group, which, static_cast<uint64_t>(seq), 100, 0);
        ++done;
        wait_until([&] { return done >= seq * kRanks; });
      }
    });
  }
}

}  // namespace
}  // namespace ours::testing
