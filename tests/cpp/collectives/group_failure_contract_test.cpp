#include <algorithm>
#include <atomic>
#include <thread>

#include "common/awaited.h"
#include "common/interval.h"
#include "support/contract.h"
#include "support/patience.h"
#include "transport/group_failure.h"

// The contract of Group (see group_contract_test.cpp): what ranks hear when something goes wrong.

namespace ours::testing {
namespace {

using std::chrono::milliseconds;

/// What a rank calls, which differs among ranks, and some words of the error that all get.
struct Mismatch {
  std::function<void(Group&, float* data)> act;
  std::vector<std::string> words;
};

void reduce(Group& group, float* data, size_t count, DType dtype = DType::Float32, ReduceKind kind = ReduceKind::Sum,
            uint64_t seq = 0) {
  group.all_reduce(call_of(Op::AllReduce, dtype, seq), data, data, count, Reduction{kind, 3, 1.0});
}

/// The beginning is all that a peer needs.
void begin_and_reduce(Group& group, float* data, size_t count) {
  Call call = call_of(Op::AllReduce, DType::Float32, 0);
  call.part = Part::Beginning;
  if (group.can_begin()) group.all_reduce(call, data, data, count, Reduction{ReduceKind::Sum, 3, 1.0});
  reduce(group, data, count);
}

const Mismatch kMismatches[] = {
    {[](Group& g, float* d) { reduce(g, d, g.rank() == 1 ? 8 : 9); }, {"8 x float32", "9 x float32", "rank 1"}},
    {[](Group& g, float* d) { begin_and_reduce(g, d, g.rank() == 1 ? 8 : 9); },
     {"8 x float32", "9 x float32", "rank 1"}},
    {[](Group& g, float* d) { reduce(g, d, 8, g.rank() == 2 ? DType::Int32 : DType::Float32); }, {"float32", "int32"}},
    {[](Group& g, float* d) { reduce(g, d, 8, DType::Float32, g.rank() == 0 ? ReduceKind::Max : ReduceKind::Sum); },
     {"MAX", "SUM"}},
    {[](Group& g, float* d) { reduce(g, d, 8, DType::Float32, ReduceKind::Sum, g.rank() == 0 ? 4 : 5); },
     {"number 4", "number 5"}},
    {[](Group& g, float* d) {
       g.broadcast(call_of(Op::Broadcast, DType::Float32, 0), Span{d, 32}, g.rank() == 2 ? 1 : 0);
     },
     {"root 0", "root 1"}},
    {[](Group& g, float* d) { g.rank() == 0 ? barrier(g, 0) : reduce(g, d, 8); }, {"barrier", "all_reduce"}},
    // The same number of elements in all, but in other parts.
    {[](Group& g, float* d) {
       const std::vector<float> in(8);
       const std::vector<size_t> counts = g.rank() == 1 ? std::vector<size_t>{8, 4, 4} : std::vector<size_t>{4, 8, 4};
       g.reduce_scatter(call_of(Op::ReduceScatter, DType::Float32, 0), {in.data(), in.data(), in.data()}, counts, d,
                        Reduction{ReduceKind::Sum, 3, 1.0});
     },
     {"reduce_scatter", "rank 1"}},
    {[](Group& g, float* d) {
       std::vector<Span> outputs{{d, 8}, {d + 2, 8}, {d + 4, 8}};
       if (g.rank() == 1) outputs[2].bytes = 4;
       const float mine[2] = {1, 2};
       g.all_gather(call_of(Op::AllGather, DType::Float32, 0), ConstSpan{mine, 8}, outputs);
     },
     {"rank 2", "8 bytes", "4"}},
};

CONTRACT(mismatches_are_found_on_every_rank_before_anything_is_written) {
  for (const Mismatch& mismatch : kMismatches) {
    run_groups(kind, 3, 4096, [&](Group& group) {
      std::vector<float> data(64, 5.0f);
      const std::string message = CHECK_THROWS(MismatchError, mismatch.act(group, data.data()));
      for (const auto& word : mismatch.words) CHECK_CONTAINS(message, word);
      for (float x : data) CHECK(x == 5.0f || kind.compares_afterwards);
      CHECK_EQ(CHECK_THROWS(MismatchError, barrier(group, 1)), message);
      CHECK_EQ(group.failure(), message);
    });
  }
}

CONTRACT(a_mismatch_is_found_before_memory_of_the_group_is_written) {
  run_groups(kind, 2, 4096, [&](Group& group) {
    const size_t count = 5000 + static_cast<size_t>(group.rank());
    const std::shared_ptr<void> memory = group.allocate(count * sizeof(float));
    if (!memory) return;
    auto* const data = static_cast<float*>(memory.get());
    std::fill_n(data, count, 5.0f);
    CHECK_THROWS(MismatchError, reduce(group, data, count));
    CHECK(std::all_of(data, data + count, [&](float x) { return x == 5.0f || kind.compares_afterwards; }));
  });
}

CONTRACT(what_has_no_meaning_is_refused_without_failing_the_group) {
  run_groups(kind, 2, 4096, [&](Group& group) {
    float data[4] = {};
    CHECK_THROWS(InvalidArgument, group.broadcast(call_of(Op::Broadcast, DType::Float32, 0), Span{data, 16}, 2));
    CHECK_THROWS(InvalidArgument, reduce(group, data, 4, DType::Float32, ReduceKind::BitAnd));
    barrier(group, 0);
  });
}

CONTRACT(a_timeout_names_who_is_absent_and_reaches_all) {
  with_growing_timeouts([&](milliseconds timeout) {
    // Not all ranks wait for rank 3 itself; some wait for those that do.
    run_groups(kind, kind.many_threads ? 4 : 7, 4096, [&](Group& group) {
      barrier(group, 6);  // so that all are connected, and know each other's hosts
      // Comes only after the others have given up.
      if (group.rank() == 3) wait_until([&] { return !group.failure().empty(); });
      const std::string message = CHECK_THROWS(TimeoutError, barrier(group, 7, timeout));
      CHECK_CONTAINS(message, "barrier number 7");
      CHECK_CONTAINS(message, "for rank 3 (host ");
      CHECK(message.find("), rank") == std::string::npos);
      CHECK_CONTAINS(message, std::to_string(timeout.count()) + "ms");
    });
  });
}

CONTRACT(a_rank_that_has_waited_for_long_can_say_for_whom) {
  with_growing_timeouts([&](milliseconds timeout) {
    run_groups(kind, 2, 4096, [&](Group& group) {
      barrier(group, 0);
      if (group.rank() == 0) {
        CHECK_THROWS(TimeoutError, barrier(group, 1, timeout));
        return;
      }
      bool said = false;
      wait_until([&] {
        said = said || describe_awaited().find("rank 1 (host ") != std::string::npos;
        return !group.failure().empty();
      });
      CHECK(said);
    });
    CHECK_EQ(describe_awaited(), std::string());
  });
}

/// Returns the nanoseconds from an abort until the last waiter has heard of it.
int64_t abort_waiters(const GroupKind& kind) {
  Group* waiter = nullptr;
  std::atomic<int> waiting{0}, freed{0};
  std::atomic<bool> over{false};
  std::atomic<int64_t> took{0};
  run_groups(kind, 4, 4096, [&](Group& group) {
    barrier(group, 0);
    if (group.rank() == 0) waiter = &group;
    if (group.rank() == 3) {
      wait_until([&] { return waiting == 3; });
      // Awake at first, asleep later: both have to be woken.
      std::this_thread::sleep_for(milliseconds(30));
      const int64_t start = steady_ns();
      waiter->abort("enough");
      over = true;
      wait_until([&] { return freed == 3; });
      took = steady_ns() - start;
      wait_until([&] { return !group.failure().empty(); });
    }
    ++waiting;
    const std::string message = CHECK_THROWS(AbortedError, barrier(group, 1));
    ++freed;
    CHECK_CONTAINS(message, "rank 0 (host ");
    CHECK_CONTAINS(message, "enough");
    wait_until([&] { return over.load(); });
  });
  return took;
}

CONTRACT(an_abort_frees_the_waiters_of_all_ranks_within_100_ms) {
  check_soon(milliseconds(100), [&] { return abort_waiters(kind); });
}

CONTRACT(what_has_begun_ends_with_the_failure_of_the_group) {
  run_groups(kind, 2, 4096, [&](Group& group) {
    if (!group.can_begin() || group.rank() == 1) return;
    float x = 1;
    Call call = call_of(Op::AllReduce, DType::Float32, 0);
    const Reduction sum{ReduceKind::Sum, 2, 1.0};
    call.part = Part::Beginning;
    CHECK(!group.all_reduce(call, &x, &x, 1, sum));
    CHECK(group.has_begun());
    group.abort("enough");
    call.part = Part::Whole;
    CHECK_THROWS(AbortedError, group.all_reduce(call, &x, &x, 1, sum));
    CHECK(!group.has_begun());
    CHECK_EQ(x, 1);
  });
}

CONTRACT(an_error_between_operations_fails_the_group_unless_it_is_misuse) {
  std::atomic<int> passed{0};
  run_groups(kind, 2, 4096, [&](Group& group) {
    group.fail(std::make_exception_ptr(InvalidArgument("misuse")));
    CHECK_EQ(group.failure(), std::string());
    barrier(group, 1);
    ++passed;
    wait_until([&] { return passed == 2; });  // a failure would reach a rank that is still in the barrier
    if (group.rank() == 0) group.fail(std::make_exception_ptr(MismatchError("shapes differ")));
    wait_until([&] { return !group.failure().empty(); });
    CHECK_CONTAINS(CHECK_THROWS(MismatchError, barrier(group, 2)), "shapes differ");
  });
}

CONTRACT(a_call_that_some_refuse_fails_the_group_and_one_that_all_refuse_does_not) {
  run_groups(kind, 3, 4096, [](Group& group) {
    for (uint64_t number = 1; number <= 6; ++number) {
      group.refuse(call_of(Op::Gather, DType::Int32, number), "a list is too short");
    }
    barrier(group, 7);
    CHECK_EQ(group.failure(), std::string());
    // No rank refuses alone before all have looked.
    barrier(group, 8);
    const Call call = call_of(Op::Gather, DType::Int32, 9);
    if (group.rank() == 1) {
      group.refuse(call, "a list is too long");
      wait_until([&] { return !group.failure().empty(); });
    } else {
      CHECK_CONTAINS(CHECK_THROWS(MismatchError, group.barrier(call)), "did not take part in gather number 9");
    }
    CHECK_CONTAINS(CHECK_THROWS(MismatchError, barrier(group, 10)), "is too long");
  });
}

CONTRACT(a_rank_that_leaves_is_named_but_its_last_contribution_counts) {
  run_groups(kind, 2, 4096, [&](Group& group) {
    std::vector<float> data{1};
    sum(group, 0, data);
    CHECK_EQ(data[0], 2.0f);
    if (group.rank() == 1) return group.leave();
    const std::string message = CHECK_THROWS(PeerError, barrier(group, 1));
    CHECK_CONTAINS(message, "rank 1");
    CHECK_CONTAINS(message, "left the group");
  });
}

CONTRACT(a_rank_that_leaves_after_a_failure_of_another_group_says_so) {
  std::atomic<int> passed{0};
  run_groups(kind, 3, 4096, [&](Group& group) {
    barrier(group, 0);
    ++passed;
    wait_until([&] { return passed == 3; });  // the failure would reach a rank that is still in the barrier
    if (group.rank() == 1) {
      GroupFailure other;
      other.record(FailureKind::Peer, "rank 7 of another group died");
      return group.leave();
    }
    const std::string message = CHECK_THROWS(PeerError, barrier(group, 1));
    CHECK_CONTAINS(message, "rank 1");
    CHECK_CONTAINS(message, "left the group");
    CHECK_CONTAINS(message, "\nBefore rank 1 left, another of its groups had failed: rank 7 of another group died");
  });
}

CONTRACT(monitored_barrier_names_the_first_or_all_missing_ranks) {
  const auto run = [&](bool all, milliseconds timeout) {
    run_groups(kind, 4, 4096, [&](Group& group) {
      group.monitored_barrier(call_of(Op::MonitoredBarrier, DType::UInt8, 0), all);
      if (group.rank() == 1 || group.rank() == 3) return;
      const std::string message = CHECK_THROWS(
          TimeoutError, group.monitored_barrier(call_of(Op::MonitoredBarrier, DType::UInt8, 1, timeout), all));
      // Rank 2 may hear rank 0's verdict before it calls, and rank 0 rank 2's.
      const std::string verdict = all ? "Ranks 1, 3 failed" : "Rank 1 failed";
      const std::string other = "Rank 2 successfully reached monitoredBarrier";
      CHECK(message.find(verdict) != std::string::npos || message.find(other) != std::string::npos);
    });
  };
  for (bool all : {false, true}) {
    with_growing_timeouts([&](milliseconds timeout) { run(all, timeout); });
  }
}

}  // namespace
}  // namespace ours::testing
