#include <algorithm>
#include <cmath>
#include <cstring>
#include <mutex>

#include "support/contract.h"
#include "support/reduce_reference.h"

// The contract of Group, which every kind of group keeps (support/groups.h), with ranks as threads: what calls give.
// The contract of what goes wrong is in group_failure_contract_test.cpp.

namespace ours::testing {
namespace {

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

/// Memory of a group, where it has any, or ordinary memory.
struct Memory {
  Memory(Group& group, size_t count, bool from_group) : own(count) {
    if (!from_group || !group.allocates()) return;
    given = group.allocate(count * sizeof(float) + 1);
    CHECK(given != nullptr);
    data = static_cast<float*>(given.get());
  }

  std::vector<float> own;
  std::shared_ptr<void> given;
  float* data = own.data();
};

CONTRACT(all_reduce_and_reduce_equal_the_sum_for_all_sizes) {
  for (int ranks : ranks_of(kind)) {
    for (size_t chunk : kChunks) {
      run_groups(kind, ranks, chunk, [&](Group& group) {
        uint64_t seq = 0;
        for (size_t count : counts_of(kind)) {
          std::vector<float> data = values(group.rank(), count);
          sum(group, seq++, data);
          CHECK(same(data, sums(ranks, count)));

          const int root = static_cast<int>(seq) % ranks;
          const std::vector<float> in = values(group.rank(), count);
          std::vector<float> out(count, -1);
          group.reduce(call_of(Op::Reduce, DType::Float32, seq++), in.data(), out.data(), count,
                       Reduction{ReduceKind::Sum, ranks, 1.0}, root);
          CHECK(same(out, group.rank() == root ? sums(ranks, count) : std::vector<float>(count, -1)));
        }
      });
    }
  }
}

/// `with_memory` ranks have their pieces in the group's memory, and the next rank some of them.
void check_pieces(const GroupKind& kind, Group& group, uint64_t seq, size_t count, int with_memory) {
  // Rank 0 has one piece; the others have several, which grow, and empty ones between them.
  std::vector<Memory> memory;
  std::vector<Span> pieces;
  const auto rank = static_cast<size_t>(kind.cuts_alike ? 1 : group.rank());
  for (size_t at = 0, n = 0; at < count; at += n) {
    n = rank == 0 ? count : std::min(count - at, 1 + (at + 7) * (rank + 2) / 3);
    // Not at the beginning of a page, so that a mix-up of pieces shows.
    const bool from_group = group.rank() < with_memory || (group.rank() == with_memory && at <= 100);
    float* const data = memory.emplace_back(group, n + 1, from_group).data + 1;
    for (size_t i = 0; i < n; ++i) data[i] = value(group.rank(), at + i);
    pieces.push_back({data, n * sizeof(float)});
    if (rank > 0) pieces.push_back(Span{});
  }
  group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), pieces, Reduction{ReduceKind::Sum, 3, 1.0});
  const std::vector<float> expected = sums(3, count);
  size_t i = 0;
  for (const Span& piece : pieces) {
    const auto* const data = static_cast<const float*>(piece.data);
    for (size_t k = 0; k < piece.bytes / sizeof(float); ++k) CHECK_EQ(data[k], expected[i++]);
  }
}

CONTRACT(all_reduce_takes_pieces_wherever_they_lie_and_however_ranks_cut) {
  run_groups(kind, 3, 4096, [&](Group& group) {
    uint64_t seq = 0;
    for (const size_t count : {size_t{0}, size_t{5}, size_t{1000}, size_t{40007}}) {
      for (const int with_memory : {3, 2, 1, 0}) check_pieces(kind, group, seq++, count, with_memory);
    }
  });
}

CONTRACT(reductions_of_all_types_equal_the_reference) {
  run_groups(kind, kind.many_threads ? 3 : 7, 4096, [&](Group& group) {
    uint64_t seq = 0;
    for (int number = 0; number <= static_cast<int>(DType::Complex128); ++number) {
      const auto dtype = static_cast<DType>(number);
      for (int which = 1; which <= static_cast<int>(ReduceKind::PremulSum); ++which) {
        const Reduction how{static_cast<ReduceKind>(which), group.size(), 0.5};
        if (!is_supported(how.kind, dtype) || !kind.has(dtype, how.kind)) continue;
        // Averages of these types are divided first, and rounded.
        const bool divided = dtype == DType::Float16 || dtype == DType::Complex32;
        if (how.kind == ReduceKind::Avg && divided) continue;
        for (const size_t count : {size_t{3}, size_t{700}}) {
          std::vector<std::vector<char>> inputs;
          std::vector<const char*> sources;
          for (int r = 0; r < group.size(); ++r) inputs.push_back(exact_values(dtype, how.kind, r, count));
          for (const auto& one : inputs) sources.push_back(one.data());
          std::vector<char> expected(count * size_of(dtype));
          reference_reduce(expected.data(), sources, count, dtype, how);
          std::vector<char> data = inputs[static_cast<size_t>(group.rank())];
          group.all_reduce(call_of(Op::AllReduce, dtype, seq++), data.data(), data.data(), count, how);
          CHECK(data == expected);
        }
      }
    }
  });
}

CONTRACT(averages_of_float16_are_in_range_where_their_sums_are_not) {
  run_groups(kind, 4, 4096, [&](Group& group) {
    for (const size_t count : {size_t{1}, size_t{30011}}) {
      std::vector<uint16_t> data(count, encode_16(40000.0f, 10));
      group.all_reduce(call_of(Op::AllReduce, DType::Float16, count), data.data(), data.data(), count,
                       Reduction{ReduceKind::Avg, 4, 1.0});
      for (const uint16_t x : data) CHECK_EQ(decode_16(x, 10), 40000.0f);
    }
  });
}

/// The average in the promised order: first over each node's ranks, then over nodes.
std::vector<float> average_in_order(const GroupKind& kind, int ranks, size_t count) {
  const Topology topology = topology_of(ranks, kind.node_of ? kind.node_of : [](int) { return 0; });
  std::vector<float> average(count);
  for (size_t i = 0; i < count; ++i) {
    for (int node = 0; node < topology.nodes(); ++node) {
      const std::vector<int>& members = topology.ranks_of(node);
      float part = fraction(members[0], i);
      for (size_t r = 1; r < members.size(); ++r) part += fraction(members[r], i);
      average[i] = node == 0 ? part : average[i] + part;
    }
    average[i] /= static_cast<float>(ranks);
  }
  return average;
}

CONTRACT(all_ranks_get_the_same_bits_which_do_not_depend_on_chunks_and_memory) {
  const int ranks = kind.many_threads ? 4 : 5;
  constexpr size_t kCounts[] = {1, 100, 5001, 50001};
  std::mutex mutex;
  std::vector<std::vector<float>> first(std::size(kCounts));
  for (const size_t chunk : {size_t{4096}, size_t{12288}, size_t{0}}) {
    for (const bool from_group : {false, true}) {
      for (std::vector<float>& one : first) {
        // Short arrays may be added up in another order than long ones, and chunks decide what is short.
        if (kind.order_by_chunks || (!kind.in_order && &one != &first.back())) one.clear();
      }
      run_groups(kind, ranks, chunk, [&](Group& group) {
        for (size_t c = 0; c < first.size(); ++c) {
          const size_t count = kCounts[c];
          const Memory memory(group, count, from_group);
          float* const data = memory.data;
          for (size_t i = 0; i < count; ++i) data[i] = fraction(group.rank(), i);
          group.all_reduce(call_of(Op::AllReduce, DType::Float32, c), data, data, count,
                           Reduction{ReduceKind::Avg, ranks, 1.0});
          const std::lock_guard<std::mutex> lock(mutex);
          if (first[c].empty()) first[c].assign(data, data + count);
          CHECK_EQ(std::memcmp(data, first[c].data(), count * sizeof(float)), 0);
        }
      });
      for (const std::vector<float>& one : first) {
        const std::vector<float> expected = average_in_order(kind, ranks, one.size());
        if (kind.in_order) CHECK(one == expected);
        for (size_t i = 0; i < one.size(); ++i) CHECK(std::fabs(one[i] - expected[i]) <= 1e-6f * expected[i]);
      }
    }
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
      for (size_t count : counts_of(kind)) {
        const int root = static_cast<int>(count) % ranks;
        std::vector<float> buffer = me == root ? values(root, count) : std::vector<float>(count, -1);
        group.broadcast(call_of(Op::Broadcast, DType::Float32, seq++), span(buffer), root);
        CHECK(same(buffer, values(root, count)));

        // Rank r gives count + r elements.
        const std::vector<float> mine = values(me, count + static_cast<size_t>(me));
        std::vector<std::vector<float>> all;
        std::vector<Span> outputs;
        for (int r = 0; r < ranks; ++r) all.emplace_back(count + static_cast<size_t>(r), -1.0f);
        for (auto& part : all) outputs.push_back(span(part));
        group.all_gather(call_of(Op::AllGather, DType::Float32, seq++), const_span(mine), outputs);
        for (int r = 0; r < ranks; ++r) {
          CHECK(same(all[static_cast<size_t>(r)], values(r, count + static_cast<size_t>(r))));
          std::fill(all[static_cast<size_t>(r)].begin(), all[static_cast<size_t>(r)].end(), -1.0f);
        }
        group.gather(call_of(Op::Gather, DType::Float32, seq++), const_span(mine),
                     me == root ? outputs : std::vector<Span>{}, root);
        for (int r = 0; me == root && r < ranks; ++r) {
          CHECK(same(all[static_cast<size_t>(r)], values(r, count + static_cast<size_t>(r))));
        }

        // Rank s sends (s + 1) * (d + 1) + count elements to rank d.
        const auto size_of_part = [&](int s, int d) { return static_cast<size_t>((s + 1) * (d + 1)) + count; };
        std::vector<std::vector<float>> sends, receives;
        std::vector<ConstSpan> inputs;
        std::vector<Span> targets;
        for (int r = 0; r < ranks; ++r) sends.push_back(values(me * ranks + r, size_of_part(me, r)));
        for (int r = 0; r < ranks; ++r) receives.emplace_back(size_of_part(r, me), -1.0f);
        for (size_t r = 0; r < n; ++r) inputs.push_back(const_span(sends[r]));
        for (size_t r = 0; r < n; ++r) targets.push_back(span(receives[r]));
        group.all_to_all(call_of(Op::AllToAll, DType::Float32, seq++), inputs, targets);
        for (int r = 0; r < ranks; ++r)
          CHECK(same(receives[static_cast<size_t>(r)], values(r * ranks + me, size_of_part(r, me))));

        std::vector<float> got(size_of_part(root, me), -1.0f);
        group.scatter(call_of(Op::Scatter, DType::Float32, seq++), me == root ? inputs : std::vector<ConstSpan>{},
                      span(got), root);
        CHECK(same(got, values(root * ranks + me, size_of_part(root, me))));
        barrier(group, seq++);
      }
    });
  }
}

CONTRACT(all_to_all_works_in_place) {
  // The last is more than the buffers of a connection hold.
  for (const size_t count : {size_t{1}, size_t{3000}, size_t{3000000}}) {
    run_groups(kind, 2, 0, [&](Group& group) {
      std::vector<std::vector<float>> parts;
      for (int r = 0; r < 2; ++r) parts.push_back(values(group.rank() * 2 + r, count));
      group.all_to_all(call_of(Op::AllToAll, DType::Float32, 0), {const_span(parts[0]), const_span(parts[1])},
                       {span(parts[0]), span(parts[1])});
      for (int r = 0; r < 2; ++r) CHECK(same(parts[static_cast<size_t>(r)], values(r * 2 + group.rank(), count)));
    });
  }
}

CONTRACT(all_to_all_may_be_in_place_on_some_ranks) {
  run_groups(kind, 2, 0, [&](Group& group) {
    const auto me = static_cast<size_t>(group.rank());
    std::vector<std::vector<float>> parts, others;
    for (int r = 0; r < 2; ++r) parts.push_back(values(group.rank() * 2 + r, 300000));
    others.assign(2, std::vector<float>(300000));
    auto& got = me == 0 ? parts : others;
    group.all_to_all(call_of(Op::AllToAll, DType::Float32, 0), {const_span(parts[0]), const_span(parts[1])},
                     {span(got[0]), span(got[1])});
    for (int r = 0; r < 2; ++r) CHECK(same(got[static_cast<size_t>(r)], values(r * 2 + group.rank(), 300000)));
  });
}

}  // namespace
}  // namespace ours::testing
