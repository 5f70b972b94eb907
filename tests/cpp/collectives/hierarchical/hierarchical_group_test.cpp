#include "collectives/hierarchical/hierarchical_group.h"

#include <cmath>

#include "support/hierarchical_ranks.h"
#include "support/patience.h"

// Tests of groups over several nodes beyond the contract of groups (group_contract_test.cpp).

namespace ours::testing {
namespace {

const NodeOf kPairs = [](int r) { return r / 2; };
const NodeOf kTriples = [](int r) { return r / 3; };

TEST(halves_on_the_wire_keep_the_promised_error_and_the_same_bits) {
  constexpr size_t kCount = 200003;
  constexpr int kRanks = 5;
  const auto input = [](int rank, size_t i) {
    return std::sin(static_cast<float>(i * 7 + static_cast<size_t>(rank) * 131)) * std::exp2(static_cast<float>(i % 9));
  };
  for (const auto& [wire, unit] :
       {std::pair<WireType, double>{WireType::BFloat16, 0x1p-8}, {WireType::Float16, 0x1p-11}}) {
    for (const ReduceKind kind : {ReduceKind::Sum, ReduceKind::Avg}) {
      for (const bool in_heap : {false, true}) {
        std::vector<std::vector<float>> results(kRanks);
        HierarchicalConfig config;
        config.wire = wire;
        HierarchicalRanks(kRanks, kPairs, config).run([&, kind = kind](HierarchicalGroup& group) {
          std::vector<float> own(kCount);
          const auto heap = in_heap ? group.allocate(kCount * sizeof(float)) : nullptr;
          auto* const data = in_heap ? static_cast<float*>(heap.get()) : own.data();
          for (size_t i = 0; i < kCount; ++i) data[i] = input(group.rank(), i);
          group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data, data, kCount, Reduction{kind, kRanks, 1.0});
          results[static_cast<size_t>(group.rank())].assign(data, data + kCount);
        });
        size_t rounded = 0;
        for (size_t i = 0; i < kCount; ++i) {
          double sum = 0, sums = 0;
          for (int node = 0; node < 3; ++node) {
            double part = 0;
            for (int r = 2 * node; r < std::min(2 * node + 2, kRanks); ++r) part += static_cast<double>(input(r, i));
            sum += part;
            sums += std::fabs(part);
          }
          const double scale = kind == ReduceKind::Avg ? 1.0 / kRanks : 1.0;
          const double result = static_cast<double>(results[0][i]);
          // The roundings of float32, and of float16's subnormal numbers.
          const double slack = 0x1p-20 * sums * scale + 0x1p-24;
          CHECK(std::fabs(result - sum * scale) <= unit * (sums * scale + std::fabs(result)) + slack);
          rounded += std::fabs(result - sum * scale) > 0x1p-16 * std::fabs(result) ? 1 : 0;
          for (const auto& other : results) CHECK_EQ(other[i], results[0][i]);
        }
        // The sums do travel as halves.
        CHECK(rounded > kCount / 2);
      }
    }
  }
}

// What a rank writes, it has taken, so that too little memory is an error and no signal.
TEST(the_shortest_reductions_take_the_memory_of_their_stages) {
  constexpr size_t kBeginnings = size_t{2 * 2} * (16 << 10);  // of both ranks, for both parities
  HierarchicalRanks(4, kPairs).run([](HierarchicalGroup& group) {
    std::vector<float> one{1};
    barrier(group, 0);
    CHECK(group.memory_use().segment < kBeginnings);
    barrier(group, 1);  // before others go on, and take more
    sum(group, 2, one);
    CHECK(group.memory_use().segment >= kBeginnings);
  });
}

TEST(a_node_with_little_memory_works_with_others) {
  HierarchicalRanks ranks(4, kPairs);
  // The first node's chunks are smaller than a short message.
  const auto sessions = make_sessions(2, 4096);
  std::copy(sessions.begin(), sessions.end(), ranks.sessions.begin());
  ranks.run([](HierarchicalGroup& group) {
    uint64_t seq = 0;
    for (const size_t count : {size_t{10}, size_t{10000}, size_t{500000}}) {
      std::vector<float> data(count, static_cast<float>(group.rank() + 1));
      sum(group, seq++, data);
      for (const float x : data) CHECK_EQ(x, 10.0f);
    }
  });
}

TEST(results_are_read_where_rails_work_or_where_they_are_published) {
  HierarchicalConfig config;
  config.chunk = 4096;
  config.rules = "all direct";
  // A rail works where its results are shown; in the same place, with two rounds a chunk; and in memory of its own.
  for (const size_t part : {size_t{1024}, size_t{2112}, size_t{8192}}) {
    config.wire_chunk = part;
    HierarchicalRanks(6, kTriples, config).run([](HierarchicalGroup& group) {
      uint64_t seq = 0;
      for (const size_t count : {size_t{100}, size_t{3000}, size_t{20'000}, size_t{10'000}, size_t{1}}) {
        for (int again = 0; again < 6; ++again) {
          const auto number = [&](size_t i, size_t rank) { return static_cast<float>((i * 7 + rank * 5 + seq) % 101); };
          std::vector<float> data(count);
          for (size_t i = 0; i < count; ++i) data[i] = number(i, static_cast<size_t>(group.rank()));
          sum(group, seq, data);
          for (size_t i = 0; i < count; ++i) {
            float expected = 0;
            for (size_t rank = 0; rank < 6; ++rank) expected += number(i, rank);
            CHECK_EQ(data[i], expected);
          }
          ++seq;
        }
      }
    });
  }
}

TEST(connections_are_made_between_nodes_only) {
  const HierarchicalRanks ranks(6, kTriples);
  std::vector<size_t> connections(6);
  ranks.run([&](HierarchicalGroup& group) {
    const auto at = static_cast<size_t>(group.rank());
    std::vector<float> data(1 << 18, 1.0f);
    sum(group, 0, data);
    barrier(group, 1);
    connections[at] = ranks.meshes[at]->connections();
    barrier(group, 2);
  });
  // One peer: a connection for control and two for data.
  for (const size_t count : connections) CHECK_EQ(count, size_t{3});
}

TEST(parts_of_another_group_are_refused) {
  const Topology topology = topology_of(2, [](int r) { return r; });
  const auto sessions = make_sessions(2, 0);
  const auto meshes = make_meshes(2);
  CHECK_CONTAINS(CHECK_THROWS(Error, HierarchicalGroup(topology, sessions[0], meshes[0])), "rank 0 of 2");
}

TEST(a_rank_that_is_absent_from_a_long_reduction_is_named_on_all_nodes) {
  // Rank 3 is no leader: only rank 1 waits for it, on a rail or in the node, and all others wait for rank 1.
  for (const NodeOf& node_of : {NodeOf([](int r) { return r % 2; }), kPairs}) {
    with_growing_timeouts([&](std::chrono::milliseconds timeout) {
      HierarchicalRanks(6, node_of).run([&](HierarchicalGroup& group) {
        std::vector<float> data(1 << 18, 1.0f);
        sum(group, 0, data);
        if (group.rank() == 3) return wait_until([&] { return !group.failure().empty(); });
        const std::string message = CHECK_THROWS(TimeoutError, sum(group, 1, data, timeout));
        CHECK_CONTAINS(message, "all_reduce number 1");
        CHECK_CONTAINS(message, " for rank 3 (host ");
        CHECK(message.find("), rank") == std::string::npos);
      });
    });
  }
}

TEST(ranks_that_are_bound_to_sockets_add_up_in_the_order_of_ranks_among_several_nodes) {
  constexpr int kLocal = 8;
  HierarchicalConfig config;
  config.chunk = 4096;
  config.sockets = {0, 1, 0, 1, 0, 1, 0, 1};
  for (const char* rules : {"", "all doubling"}) {
    config.rules = rules;
    HierarchicalRanks(
        2 * kLocal, [](int r) { return r / kLocal; }, config)
        .run([&](HierarchicalGroup& group) {
          uint64_t seq = 0;
          for (const size_t count : {size_t{100}, size_t{30000}}) {
            std::vector<float> expected(count);
            for (size_t i = 0; i < count; ++i) {
              float nodes[2] = {fraction(0, i), fraction(kLocal, i)};
              for (int r = 1; r < kLocal; ++r) {
                nodes[0] += fraction(r, i);
                nodes[1] += fraction(kLocal + r, i);
              }
              expected[i] = nodes[0] + nodes[1];
            }
            std::vector<float> data = fractions(group.rank(), count);
            sum(group, seq++, data);
            CHECK(data == expected);

            const std::vector<float> in = fractions(group.rank(), count);
            const std::vector<const void*> inputs(static_cast<size_t>(group.size()), in.data());
            const std::vector<size_t> counts(inputs.size(), count);
            group.reduce_scatter(call_of(Op::ReduceScatter, DType::Float32, seq++), inputs, counts, data.data(),
                                 Reduction{ReduceKind::Sum, group.size(), 1.0});
            CHECK(data == expected);
          }
        });
  }
}

}  // namespace
}  // namespace ours::testing
