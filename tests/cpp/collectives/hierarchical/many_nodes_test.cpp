#include <atomic>
#include <cmath>
#include <numeric>

#include "support/hierarchical_ranks.h"

// The algorithms for many nodes: doubling and rings. The table of algorithms makes few nodes use them, too, and so the
// contract of groups (group_contract_test.cpp).

namespace ours::testing {
namespace {

using Results = std::vector<std::vector<float>>;

HierarchicalConfig config_of(const std::string& rules, size_t chunk = 4096) {
  HierarchicalConfig config;
  config.chunk = chunk;
  config.rules = rules;
  return config;
}

/// Nodes of two, three and one ranks in turn, for `nodes` nodes.
HierarchicalRanks nodes_of(int nodes, const HierarchicalConfig& config) {
  std::vector<int> node_of;
  for (int node = 0; node < nodes; ++node) node_of.insert(node_of.end(), static_cast<size_t>((node + 1) % 3 + 1), node);
  return {static_cast<int>(node_of.size()), [&](int rank) { return node_of[static_cast<size_t>(rank)]; }, config};
}

/// All ranks must have the same bits, whatever is rounded; returns the results of rank 0.
Results check_same_bits(const HierarchicalRanks& ranks, bool in_heap = false) {
  const int size = ranks.topology.size();
  std::vector<Results> results(static_cast<size_t>(size));
  ranks.run([&](HierarchicalGroup& group) {
    uint64_t seq = 0;
    for (const size_t count : {size_t{0}, size_t{1}, size_t{17}, size_t{1000}, size_t{20011}}) {
      std::vector<float> own(count);
      const auto heap = in_heap ? group.allocate(count * sizeof(float) + 1) : nullptr;
      auto* const data = heap ? static_cast<float*>(heap.get()) : own.data();
      for (size_t i = 0; i < count; ++i) data[i] = fraction(group.rank(), i);
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data, data, count,
                       Reduction{ReduceKind::Avg, size, 1.0});
      results[static_cast<size_t>(group.rank())].emplace_back(data, data + count);
      // The result goes to each rank in turn, from another buffer.
      const int root = static_cast<int>(seq) % size;
      std::vector<float> in(count), out(count, -1.0f);
      std::iota(in.begin(), in.end(), static_cast<float>(group.rank()));
      group.reduce(call_of(Op::Reduce, DType::Float32, seq++), in.data(), out.data(), count,
                   Reduction{ReduceKind::Sum, size, 1.0}, root);
      for (size_t i = 0; i < count; ++i) {
        const auto all = static_cast<float>(size);
        CHECK_EQ(out[i], group.rank() == root ? all * static_cast<float>(i) + all * (all - 1) / 2 : -1.0f);
      }
    }
  });
  for (const auto& result : results) CHECK(result == results[0]);
  for (const std::vector<float>& average : results[0]) {
    for (size_t i = 0; i < average.size(); ++i) {
      double expected = 0;
      for (int r = 0; r < size; ++r) expected += static_cast<double>(fraction(r, i));
      CHECK(std::fabs(static_cast<double>(average[i]) * size - expected) <= 1e-6 * expected);
    }
  }
  return results[0];
}

TEST(many_nodes_get_the_same_bits_on_all_ranks) {
  for (const char* rules : {"all bytes<=4K doubling;all ring", "all doubling", "all ring"}) {
    for (int count = 2; count <= 9; ++count) check_same_bits(nodes_of(count, config_of(rules)), count % 2 == 0);
  }
  // The default chunks, and one stream fewer.
  HierarchicalConfig config = config_of("all ring", 0);
  config.streams = 1;
  check_same_bits(nodes_of(4, config));
  config.limits.rails = 1;
  check_same_bits(nodes_of(5, config), true);
}

TEST(a_ring_adds_up_in_another_order_only_among_three_nodes_and_more) {
  for (const int nodes : {2, 4}) {
    const Results ring = check_same_bits(nodes_of(nodes, config_of("all ring")));
    const Results direct = check_same_bits(nodes_of(nodes, config_of("all direct")));
    CHECK_EQ(ring == direct, nodes == 2);
  }
}

TEST(halves_on_the_wire_go_directly) {
  std::vector<std::vector<float>> results(2, std::vector<float>(30001));
  for (const size_t ring : {size_t{0}, size_t{1}}) {
    HierarchicalConfig config = config_of(ring == 1 ? "all ring" : "all direct");
    config.wire = WireType::BFloat16;
    HierarchicalRanks(
        4, [](int r) { return r; }, config)
        .run([&](HierarchicalGroup& group) {
          std::vector<float> data = fractions(group.rank(), results[0].size());
          sum(group, 0, data);
          if (group.rank() == 1) results[ring] = data;
        });
  }
  CHECK(results[0] == results[1]);
}

/// The connections of each rank after calls of all sizes, on that many nodes with two ranks each.
std::vector<size_t> connections_of(int nodes, const std::string& rules) {
  HierarchicalConfig config = config_of(rules);
  config.streams = 1;
  const HierarchicalRanks ranks(2 * nodes, [](int r) { return r / 2; }, config);
  std::vector<size_t> connections(static_cast<size_t>(2 * nodes));
  std::atomic<int> counted{0};
  ranks.run([&](HierarchicalGroup& group) {
    const auto at = static_cast<size_t>(group.rank());
    uint64_t seq = 0;
    for (const size_t count : {size_t{5000}, size_t{100000}}) {
      std::vector<float> data(count, 1.0f);
      sum(group, seq++, data);
      for (const float x : data) CHECK_EQ(x, static_cast<float>(2 * nodes));
    }
    connections[at] = ranks.meshes[at]->connections();
    // A barrier would make further connections.
    ++counted;
    wait_until([&] { return counted == 2 * nodes; });
  });
  return connections;
}

TEST(a_ring_needs_two_neighbours_however_many_nodes_there_are) {
  // One connection for control and one for data to each neighbour.
  for (const int nodes : {3, 6, 9}) {
    for (const size_t count : connections_of(nodes, "all ring")) CHECK_EQ(count, size_t{4});
  }
  for (const size_t count : connections_of(6, "all direct")) CHECK_EQ(count, size_t{10});
}

TEST(nodes_that_choose_differently_find_out) {
  // The others' calls have another size, and so use another algorithm.
  const auto config = config_of("all bytes<=1K doubling;all bytes<=64K ring;all direct");
  for (const size_t odd : {size_t{10}, size_t{10000}, size_t{30000}}) {
    for (const size_t even : {size_t{10}, size_t{10000}, size_t{30000}}) {
      if (odd == even) continue;
      HierarchicalRanks(
          12, [](int r) { return r / 2; }, config)
          .run([&](HierarchicalGroup& group) {
            std::vector<float> data(group.rank() / 2 == 3 ? odd : even, 5.0f);
            const std::string message = CHECK_THROWS(MismatchError, sum(group, 0, data));
            CHECK_CONTAINS(message, std::to_string(odd) + " x float32");
            CHECK_CONTAINS(message, std::to_string(even) + " x float32");
            for (const float x : data) CHECK_EQ(x, 5.0f);
          });
    }
  }
}

}  // namespace
}  // namespace ours::testing
