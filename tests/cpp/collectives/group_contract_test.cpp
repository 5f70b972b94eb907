#include <algorithm>
#include <mutex>
#include <thread>

#include "support/device_ranks.h"
#include "support/patience.h"

// The contract of Group, which every kind of group (see groups.h) keeps, with ranks as threads.

namespace ours {
namespace {

using testing::call_of;
using testing::device_kinds;
using testing::group_kinds;
using testing::GroupKind;
using testing::run_groups;
using testing::with_growing_timeouts;

/// A test that runs on every kind of group.
#define CONTRACT(name)                                            \
  void contract_##name(const GroupKind& kind);                    \
  TEST(name) {                                                    \
    for (const auto* kinds : {&group_kinds(), &device_kinds()}) { \
      for (const GroupKind& kind : *kinds) {                      \
        contract_##name(kind);                                    \
      }                                                           \
    }                                                             \
  }                                                               \
  void contract_##name(const GroupKind& kind)

constexpr size_t kChunks[] = {4096, 0};

std::vector<size_t> counts_of(const GroupKind& kind) {
  if (kind.many_threads) return {0, 3, 1024, 5000};
  // With the chunks of these tests, other algorithms begin around 20, 256 and 1024 elements.
  return {0, 3, 20, 21, 256, 257, 1024, 5000, 100003};
}

std::vector<int> ranks_of(const GroupKind& kind) {
  if (kind.many_threads) return {1, 3, 4};
  return {1, 2, 3, 4, 7};
}

float value(int rank, size_t i) { return static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101); }

std::vector<float> values(int rank, size_t count) {
  std::vector<float> all(count);
  for (size_t i = 0; i < count; ++i) all[i] = value(rank, i);
  return all;
}

float sum_at(int ranks, size_t i) {
  float sum = 0;
  for (int r = 0; r < ranks; ++r) sum += value(r, i);
  return sum;
}

CONTRACT(all_reduce_and_reduce_equal_the_sum_for_all_sizes) {
  for (int ranks : ranks_of(kind)) {
    for (size_t chunk : kChunks) {
      run_groups(kind, ranks, chunk, [&](Group& group) {
        uint64_t seq = 0;
        for (size_t count : counts_of(kind)) {
          std::vector<float> data = values(group.rank(), count);
          group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data.data(), data.data(), count,
                           Reduction{ReduceKind::Sum, ranks, 1.0});
          for (size_t i = 0; i < count; ++i) CHECK_EQ(data[i], sum_at(ranks, i));

          const int root = static_cast<int>(seq) % ranks;
          const std::vector<float> in = values(group.rank(), count);
          std::vector<float> out(count, -1);
          group.reduce(call_of(Op::Reduce, DType::Float32, seq++), in.data(), out.data(), count,
                       Reduction{ReduceKind::Sum, ranks, 1.0}, root);
          for (size_t i = 0; i < count; ++i) CHECK_EQ(out[i], group.rank() == root ? sum_at(ranks, i) : -1);
        }
      });
    }
  }
}

CONTRACT(all_reduce_does_not_mind_where_ranks_cut_their_arrays) {
  for (const size_t count : {size_t{0}, size_t{5}, size_t{1000}, size_t{40007}}) {
    run_groups(kind, 3, 4096, [&](Group& group) {
      std::vector<float> data = values(group.rank(), count);
      // Rank 0 has one piece; the others have several, the first of them empty.
      std::vector<Span> pieces;
      const size_t step = group.rank() == 0 ? count + 1 : count / 3 + 1;
      if (group.rank() > 0) pieces.push_back(Span{});
      for (size_t at = 0; at < count; at += step) {
        pieces.push_back(Span{&data[at], std::min(step, count - at) * sizeof(float)});
      }
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), pieces, Reduction{ReduceKind::Sum, 3, 1.0});
      for (size_t i = 0; i < count; ++i) CHECK_EQ(data[i], sum_at(3, i));
    });
  }
}

CONTRACT(reduce_scatter_takes_uneven_parts) {
  for (int ranks : ranks_of(kind)) {
    run_groups(kind, ranks, 4096, [&](Group& group) {
      uint64_t seq = 0;
      for (size_t base : counts_of(kind)) {
        std::vector<size_t> counts;
        std::vector<std::vector<float>> data;
        std::vector<const void*> inputs;
        for (int d = 0; d < ranks; ++d) {
          counts.push_back(base / static_cast<size_t>(d + 1));
          data.push_back(values(group.rank() + d, counts.back()));
        }
        for (auto& part : data) inputs.push_back(part.data());
        const auto me = static_cast<size_t>(group.rank());
        std::vector<float> out(counts[me]);
        group.reduce_scatter(call_of(Op::ReduceScatter, DType::Float32, seq++), inputs, counts, out.data(),
                             Reduction{ReduceKind::Max, ranks, 1.0});
        for (size_t i = 0; i < out.size(); ++i) {
          float most = 0;
          for (int r = 0; r < ranks; ++r) most = std::max(most, value(r + group.rank(), i));
          CHECK_EQ(out[i], most);
        }
      }
    });
  }
}

CONTRACT(data_moves_to_where_it_should) {
  for (int ranks : ranks_of(kind)) {
    run_groups(kind, ranks, 4096, [&](Group& group) {
      const int me = group.rank();
      const auto n = static_cast<size_t>(ranks);
      uint64_t seq = 0;
      const auto span = [](std::vector<float>& v) { return Span{v.data(), v.size() * sizeof(float)}; };
      const auto cspan = [](const std::vector<float>& v) { return ConstSpan{v.data(), v.size() * sizeof(float)}; };
      for (size_t count : counts_of(kind)) {
        const int root = static_cast<int>(count) % ranks;
        std::vector<float> buffer = me == root ? values(root, count) : std::vector<float>(count, -1);
        group.broadcast(call_of(Op::Broadcast, DType::Float32, seq++), span(buffer), root);
        CHECK(buffer == values(root, count));

        // Rank r gives count + r elements.
        const std::vector<float> mine = values(me, count + static_cast<size_t>(me));
        std::vector<std::vector<float>> all;
        std::vector<Span> outputs;
        for (int r = 0; r < ranks; ++r) all.emplace_back(count + static_cast<size_t>(r), -1.0f);
        for (auto& part : all) outputs.push_back(span(part));
        group.all_gather(call_of(Op::AllGather, DType::Float32, seq++), cspan(mine), outputs);
        for (int r = 0; r < ranks; ++r) {
          CHECK(all[static_cast<size_t>(r)] == values(r, count + static_cast<size_t>(r)));
          std::fill(all[static_cast<size_t>(r)].begin(), all[static_cast<size_t>(r)].end(), -1.0f);
        }
        group.gather(call_of(Op::Gather, DType::Float32, seq++), cspan(mine),
                     me == root ? outputs : std::vector<Span>{}, root);
        for (int r = 0; me == root && r < ranks; ++r) {
          CHECK(all[static_cast<size_t>(r)] == values(r, count + static_cast<size_t>(r)));
        }

        // Rank s sends (s + 1) * (d + 1) + count elements to rank d.
        const auto size_of_part = [&](int s, int d) { return static_cast<size_t>((s + 1) * (d + 1)) + count; };
        std::vector<std::vector<float>> sends, receives;
        std::vector<ConstSpan> inputs;
        std::vector<Span> targets;
        for (int r = 0; r < ranks; ++r) sends.push_back(values(me * ranks + r, size_of_part(me, r)));
        for (int r = 0; r < ranks; ++r) receives.emplace_back(size_of_part(r, me), -1.0f);
        for (size_t r = 0; r < n; ++r) inputs.push_back(cspan(sends[r]));
        for (size_t r = 0; r < n; ++r) targets.push_back(span(receives[r]));
        group.all_to_all(call_of(Op::AllToAll, DType::Float32, seq++), inputs, targets);
        for (int r = 0; r < ranks; ++r)
          CHECK(receives[static_cast<size_t>(r)] == values(r * ranks + me, size_of_part(r, me)));

        std::vector<float> got(size_of_part(root, me), -1.0f);
        group.scatter(call_of(Op::Scatter, DType::Float32, seq++), me == root ? inputs : std::vector<ConstSpan>{},
                      span(got), root);
        CHECK(got == values(root * ranks + me, size_of_part(root, me)));
        group.barrier(call_of(Op::Barrier, DType::UInt8, seq++));
      }
    });
  }
}

CONTRACT(all_to_all_works_in_place) {
  // The last is more than the buffers of a connection hold.
  for (const size_t count : {size_t{1}, size_t{3000}, size_t{3000000}}) {
    run_groups(kind, 2, 0, [&](Group& group) {
      std::vector<std::vector<float>> parts;
      std::vector<ConstSpan> inputs;
      std::vector<Span> outputs;
      for (int r = 0; r < 2; ++r) parts.push_back(values(group.rank() * 2 + r, count));
      for (auto& part : parts) inputs.push_back(ConstSpan{part.data(), count * sizeof(float)});
      for (auto& part : parts) outputs.push_back(Span{part.data(), count * sizeof(float)});
      group.all_to_all(call_of(Op::AllToAll, DType::Float32, 0), inputs, outputs);
      for (int r = 0; r < 2; ++r) CHECK(parts[static_cast<size_t>(r)] == values(r * 2 + group.rank(), count));
    });
  }
}

CONTRACT(sums_have_the_same_bits_whatever_the_chunk) {
  if (kind.order_by_chunks) return;
  std::vector<std::vector<float>> results;
  for (size_t chunk : {size_t{4096}, size_t{12288}, size_t{0}, size_t{1} << 20}) {
    std::mutex mutex;
    run_groups(kind, 3, chunk, [&](Group& group) {
      std::vector<float> data(50001);
      for (size_t i = 0; i < data.size(); ++i) {
        data[i] = 1.0f / static_cast<float>(i * 3 + static_cast<size_t>(group.rank()) * 7 + 1);
      }
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data.data(), data.data(), data.size(),
                       Reduction{ReduceKind::Avg, 3, 1.0});
      std::lock_guard<std::mutex> lock(mutex);
      results.push_back(data);
    });
  }
  CHECK_EQ(results.size(), size_t{12});
  for (const auto& result : results) CHECK(result == results[0]);
}

// Every rank must throw the same MismatchError, leave its output alone, and stay failed.
void check_mismatch(const GroupKind& kind, const std::function<void(Group&, float*)>& act,
                    const std::vector<std::string>& words) {
  run_groups(kind, 3, 4096, [&](Group& group) {
    std::vector<float> data(64, 5.0f);
    const std::string message = CHECK_THROWS(MismatchError, act(group, data.data()));
    for (const auto& word : words) CHECK_CONTAINS(message, word);
    for (float x : data) CHECK(x == 5.0f || kind.compares_afterwards);
    CHECK_EQ(CHECK_THROWS(MismatchError, group.barrier(call_of(Op::Barrier, DType::UInt8, 1))), message);
    CHECK_EQ(group.failure(), message);
  });
}

CONTRACT(mismatches_are_found_on_every_rank_before_anything_is_written) {
  const auto reduce = [](Group& group, float* data, size_t count, DType dtype, ReduceKind kind, uint64_t seq) {
    group.all_reduce(call_of(Op::AllReduce, dtype, seq), data, data, count, Reduction{kind, 3, 1.0});
  };
  check_mismatch(kind,
                 [&](Group& g, float* d) { reduce(g, d, g.rank() == 1 ? 8 : 9, DType::Float32, ReduceKind::Sum, 0); },
                 {"8 x float32", "9 x float32", "rank 1"});
  check_mismatch(
      kind,
      [&](Group& g, float* d) { reduce(g, d, 8, g.rank() == 2 ? DType::Int32 : DType::Float32, ReduceKind::Sum, 0); },
      {"float32", "int32"});
  check_mismatch(kind,
                 [&](Group& g, float* d) {
                   reduce(g, d, 8, DType::Float32, g.rank() == 0 ? ReduceKind::Max : ReduceKind::Sum, 0);
                 },
                 {"MAX", "SUM"});
  check_mismatch(kind,
                 [&](Group& g, float* d) { reduce(g, d, 8, DType::Float32, ReduceKind::Sum, g.rank() == 0 ? 4 : 5); },
                 {"number 4", "number 5"});
  check_mismatch(kind,
                 [&](Group& g, float* d) {
                   g.broadcast(call_of(Op::Broadcast, DType::Float32, 0), Span{d, 32}, g.rank() == 2 ? 1 : 0);
                 },
                 {"root 0", "root 1"});
  check_mismatch(kind,
                 [&](Group& g, float* d) {
                   if (g.rank() == 0) {
                     g.barrier(call_of(Op::Barrier, DType::UInt8, 0));
                   } else {
                     reduce(g, d, 8, DType::Float32, ReduceKind::Sum, 0);
                   }
                 },
                 {"barrier", "all_reduce"});
  // As many elements in all, but other parts.
  check_mismatch(kind,
                 [&](Group& g, float* d) {
                   const std::vector<float> in(8);
                   const std::vector<size_t> counts =
                       g.rank() == 1 ? std::vector<size_t>{8, 4, 4} : std::vector<size_t>{4, 8, 4};
                   g.reduce_scatter(call_of(Op::ReduceScatter, DType::Float32, 0), {in.data(), in.data(), in.data()},
                                    counts, d, Reduction{ReduceKind::Sum, 3, 1.0});
                 },
                 {"reduce_scatter", "rank 1"});
  check_mismatch(kind,
                 [&](Group& g, float* d) {
                   const size_t expected = g.rank() == 1 ? 4 : 8;
                   std::vector<Span> outputs{{d, 8}, {d + 2, 8}, {d + 4, 8}};
                   if (g.rank() != 2) outputs[2].bytes = expected;
                   const float mine[2] = {1, 2};
                   g.all_gather(call_of(Op::AllGather, DType::Float32, 0), ConstSpan{mine, 8}, outputs);
                 },
                 {"rank 2", "8 bytes", "4"});
}

CONTRACT(what_has_no_meaning_is_refused_without_failing_the_group) {
  run_groups(kind, 2, 4096, [&](Group& group) {
    float data[4] = {};
    CHECK_THROWS(InvalidArgument, group.broadcast(call_of(Op::Broadcast, DType::Float32, 0), Span{data, 16}, 2));
    CHECK_THROWS(InvalidArgument, group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data, data, 4,
                                                   Reduction{ReduceKind::BitAnd, 2, 1.0}));
    group.barrier(call_of(Op::Barrier, DType::UInt8, 0));
  });
}

CONTRACT(a_timeout_names_who_is_absent_and_reaches_all) {
  with_growing_timeouts([&](std::chrono::milliseconds timeout) {
    run_groups(kind, 3, 4096, [&](Group& group) {
      if (group.rank() == 1) {
        // Comes only after the others have given up.
        while (group.failure().empty()) std::this_thread::yield();
      }
      const std::string message =
          CHECK_THROWS(TimeoutError, group.barrier(call_of(Op::Barrier, DType::UInt8, 7, timeout)));
      CHECK_CONTAINS(message, "barrier number 7");
      CHECK_CONTAINS(message, "for rank 1 (host ");
      CHECK_CONTAINS(message, std::to_string(timeout.count()) + "ms");
    });
  });
}

CONTRACT(abort_frees_waiters_and_is_told_to_peers) {
  run_groups(kind, 3, 4096, [&](Group& group) {
    if (group.rank() == 2) {
      group.abort("enough");
    }
    const std::string message = CHECK_THROWS(AbortedError, group.barrier(call_of(Op::Barrier, DType::UInt8, 0)));
    CHECK_CONTAINS(message, "rank 2");
    CHECK_CONTAINS(message, "enough");
  });
}

CONTRACT(an_error_between_operations_fails_the_group_unless_it_is_misuse) {
  run_groups(kind, 2, 4096, [](Group& group) {
    group.fail(std::make_exception_ptr(InvalidArgument("misuse")));
    CHECK_EQ(group.failure(), std::string());
    group.barrier(call_of(Op::Barrier, DType::UInt8, 1));
    if (group.rank() == 0) group.fail(std::make_exception_ptr(MismatchError("shapes differ")));
    while (group.failure().empty()) std::this_thread::yield();
    CHECK_CONTAINS(CHECK_THROWS(MismatchError, group.barrier(call_of(Op::Barrier, DType::UInt8, 2))), "shapes differ");
  });
}

CONTRACT(a_call_that_some_refuse_fails_the_group_and_one_that_all_refuse_does_not) {
  run_groups(kind, 3, 4096, [](Group& group) {
    for (uint64_t number = 1; number <= 6; ++number) {
      group.refuse(call_of(Op::Gather, DType::Int32, number), "a list is too short");
    }
    group.barrier(call_of(Op::Barrier, DType::UInt8, 7));
    CHECK_EQ(group.failure(), std::string());
    // No rank refuses alone before all have looked.
    group.barrier(call_of(Op::Barrier, DType::UInt8, 8));
    const Call call = call_of(Op::Gather, DType::Int32, 9);
    if (group.rank() == 1) {
      group.refuse(call, "a list is too long");
      while (group.failure().empty()) std::this_thread::yield();
    } else {
      CHECK_CONTAINS(CHECK_THROWS(MismatchError, group.barrier(call)), "did not take part in gather number 9");
    }
    CHECK_CONTAINS(CHECK_THROWS(MismatchError, group.barrier(call_of(Op::Barrier, DType::UInt8, 10))), "is too long");
  });
}

CONTRACT(a_rank_that_leaves_is_named_but_its_last_contribution_counts) {
  run_groups(kind, 2, 4096, [&](Group& group) {
    float x = 1;
    group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), &x, &x, 1, Reduction{ReduceKind::Sum, 2, 1.0});
    CHECK_EQ(x, 2.0f);
    if (group.rank() == 1) {
      group.leave();
      return;
    }
    const std::string message = CHECK_THROWS(PeerError, group.barrier(call_of(Op::Barrier, DType::UInt8, 1)));
    CHECK_CONTAINS(message, "rank 1");
    CHECK_CONTAINS(message, "left the group");
  });
}

CONTRACT(monitored_barrier_names_the_first_or_all_missing_ranks) {
  const auto run = [&](bool all, std::chrono::milliseconds timeout) {
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
    with_growing_timeouts([&](std::chrono::milliseconds timeout) { run(all, timeout); });
  }
}

}  // namespace
}  // namespace ours
