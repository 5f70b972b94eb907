#include <algorithm>
#include <atomic>

#include "support/contract.h"
#include "transport/stop_notice.h"

// All ranks learn from an all-reduce or a barrier whether one of them had been asked to stop when it began.

namespace ours::testing {
namespace {

bool runs_on_the_host(const GroupKind& kind) {
  const auto& hosts = group_kinds();
  return std::any_of(hosts.begin(), hosts.end(), [&](const GroupKind& host) { return host.name == kind.name; });
}

CONTRACT(all_ranks_learn_that_one_was_asked_to_stop) {
  constexpr size_t kCounts[] = {0, 3, 21, 257, 1024, 5000, 40003};
  const int ranks = kind.many_threads ? 3 : 5;
  constexpr uint64_t kCalls = 2 * std::size(kCounts);
  // By call: how many ranks were told.
  std::atomic<int> told[kCalls]{};
  run_groups(kind, ranks, 4096, [&](Group& group) {
    uint64_t seq = 0;
    const auto call = [&](Op op, const auto& body) {
      // Each rank is asked in its turn, and nobody in every other call.
      const bool any = seq % 2 == 1;
      StopNotice notice(any && group.rank() == static_cast<int>(seq / 2) % ranks);
      Call one = call_of(op, DType::Float32, seq);
      one.stop = &notice;
      body(one);
      if (notice.told()) ++told[seq];
      ++seq;
    };
    for (const size_t count : kCounts) {
      for (int twice = 0; twice < 2; ++twice) {
        if (count == 3) {
          call(Op::Barrier, [&](const Call& one) { group.barrier(one); });
          continue;
        }
        std::vector<float> data(count, 1);
        call(Op::AllReduce, [&](const Call& one) {
          group.all_reduce(one, data.data(), data.data(), count, Reduction{ReduceKind::Sum, ranks, 1.0});
        });
      }
    }
  });
  for (uint64_t seq = 0; seq < kCalls; ++seq) {
    if (seq % 2 == 0) {
      CHECK_EQ(told[seq].load(), 0);
    } else if (runs_on_the_host(kind)) {
      CHECK_EQ(told[seq].load(), ranks);
    } else {
      // What a device does by itself tells nobody.
      CHECK(told[seq] == 0 || told[seq] == ranks);
    }
  }
}

}  // namespace
}  // namespace ours::testing
