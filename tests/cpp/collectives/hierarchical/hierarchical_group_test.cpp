#include "collectives/hierarchical/hierarchical_group.h"

#include <cmath>

#include "support/groups.h"
#include "support/reduce_reference.h"

// Tests of groups over several nodes beyond the contract of groups (group_contract_test.cpp).

namespace ours {
namespace {

using std::chrono::seconds;
using testing::call_of;
using testing::HierarchicalConfig;
using testing::loopback_config;
using testing::make_hierarchical;
using testing::make_sessions;
using testing::run_ranks;
using testing::topology_of;

using NodeOf = std::function<int(int)>;

void run_nodes(int ranks, const NodeOf& node_of, const HierarchicalConfig& config,
               const std::function<void(HierarchicalGroup&)>& fn) {
  const auto makers = make_hierarchical(ranks, node_of, config);
  run_ranks(ranks, [&](int rank) {
    const auto group = makers[static_cast<size_t>(rank)]();
    fn(static_cast<HierarchicalGroup&>(*group));
  });
}

float value(int rank, size_t i) { return 1.0f / static_cast<float>(i * 3 + static_cast<size_t>(rank) * 7 + 1); }

/// The average in the promised order: first over each node's ranks, then over nodes.
float ordered_average(int ranks, const NodeOf& node_of, size_t i) {
  const Topology topology = topology_of(ranks, node_of);
  float sum = 0;
  for (int node = 0; node < topology.nodes(); ++node) {
    float part = 0;
    for (const int rank : topology.ranks_of(node))
      part = rank == topology.ranks_of(node)[0] ? value(rank, i) : part + value(rank, i);
    sum = node == 0 ? part : sum + part;
  }
  return sum / static_cast<float>(ranks);
}

TEST(sums_over_nodes_go_by_ranks_and_then_by_nodes) {
  const NodeOf three_one = [](int r) { return r == 2 ? 1 : 0; };
  const NodeOf pairs = [](int r) { return r / 2; };
  const NodeOf turns = [](int r) { return r % 2; };
  for (const auto& [ranks, node_of] : {std::pair<int, NodeOf>{4, three_one}, {8, pairs}, {4, turns}}) {
    // Short arrays, long ones in stages of several sizes, and long ones in the heap must all give the same bits.
    for (const size_t chunk : {size_t{4096}, size_t{12288}, size_t{0}}) {
      for (const bool in_heap : {false, true}) {
        HierarchicalConfig config;
        config.chunk = chunk;
        run_nodes(ranks, node_of, config, [&, n = ranks, where = node_of](HierarchicalGroup& group) {
          uint64_t seq = 0;
          for (const size_t count : {size_t{100}, size_t{5001}, size_t{200001}}) {
            std::vector<float> own(count);
            const auto heap = in_heap ? group.allocate(count * sizeof(float)) : nullptr;
            CHECK_EQ(heap != nullptr, in_heap);
            auto* const data = in_heap ? static_cast<float*>(heap.get()) : own.data();
            for (size_t i = 0; i < count; ++i) data[i] = value(group.rank(), i);
            group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data, data, count,
                             Reduction{ReduceKind::Avg, n, 1.0});
            for (size_t i = 0; i < count; i += 97) CHECK_EQ(data[i], ordered_average(n, where, i));
          }
        });
      }
    }
  }
}

TEST(nodes_and_ranks_need_not_agree_on_where_their_data_lies) {
  run_nodes(
      5, [](int r) { return r / 2; }, HierarchicalConfig(),
      [](HierarchicalGroup& group) {
        uint64_t seq = 0;
        // Ranks 0 and 1 have their data in the heap, and of the others only rank 2: one node reduces in place and one
        // in stages.
        constexpr size_t kCount = 300007;
        for (int round = 0; round < 3; ++round) {
          const bool in_heap = group.rank() < 3;
          const auto heap = in_heap ? group.allocate(kCount * sizeof(float)) : nullptr;
          std::vector<float> own(kCount);
          auto* const data = in_heap ? static_cast<float*>(heap.get()) : own.data();
          for (size_t i = 0; i < kCount; ++i)
            data[i] = static_cast<float>((i + static_cast<size_t>(group.rank())) % 13);
          // The pieces differ between ranks.
          const size_t cut = 1000 * static_cast<size_t>(group.rank() + 1);
          group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++),
                           {Span{data, cut * 4}, Span{}, Span{data + cut, (kCount - cut) * 4}},
                           Reduction{ReduceKind::Sum, 5, 1.0});
          for (size_t i = 0; i < kCount; i += 101) {
            float sum = 0;
            for (size_t r = 0; r < 5; ++r) sum += static_cast<float>((i + r) % 13);
            CHECK_EQ(data[i], sum);
          }
        }
      });
}

TEST(averages_of_float16_stay_in_range) {
  run_nodes(
      4, [](int r) { return r / 2; }, HierarchicalConfig(),
      [](HierarchicalGroup& group) {
        for (const size_t count : {size_t{8}, size_t{300000}}) {
          std::vector<uint16_t> data(count, testing::encode_16(40000.0f, 10));
          group.all_reduce(call_of(Op::AllReduce, DType::Float16, count), data.data(), data.data(), count,
                           Reduction{ReduceKind::Avg, 4, 1.0});
          for (const uint16_t x : data) CHECK_EQ(testing::decode_16(x, 10), 40000.0f);
        }
      });
}

TEST(halves_on_the_wire_keep_the_promised_error_and_the_same_bits) {
  constexpr size_t kCount = 200003;
  constexpr int kRanks = 5;
  const NodeOf node_of = [](int r) { return r / 2; };
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
        run_nodes(kRanks, node_of, config, [&, kind = kind](HierarchicalGroup& group) {
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

TEST(a_node_with_little_memory_works_with_others) {
  const Topology topology = topology_of(4, [](int r) { return r / 2; });
  // The first node's chunks are smaller than a short message.
  auto sessions = make_sessions(topology, 0);
  const auto leader = NodeSession::create(0, 2, NodeConfig{4096, 1024, 4096});
  sessions[0] = leader;
  sessions[1] = std::make_shared<NodeSession>(1, 2, leader->memory());
  const auto meshes = testing::make_meshes(4);
  run_ranks(4, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    sessions[at]->wait_attached(Deadline::after(seconds(30)), [] {});
    HierarchicalGroup group(topology, sessions[at], meshes[at]);
    uint64_t seq = 0;
    for (const size_t count : {size_t{10}, size_t{10000}, size_t{500000}}) {
      std::vector<float> data(count, static_cast<float>(rank + 1));
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data.data(), data.data(), count,
                       Reduction{ReduceKind::Sum, 4, 1.0});
      for (const float x : data) CHECK_EQ(x, 10.0f);
    }
  });
}

TEST(results_are_read_where_rails_work_or_where_they_are_published) {
  constexpr size_t kNodeChunk = 4096;
  const auto node_of = [](int r) { return r / 3; };
  const Topology topology = topology_of(6, node_of);
  TcpConfig tcp = loopback_config();
  tcp.plan.rules = "all direct";
  // A rail works where its results are shown; in the same place, with two rounds a chunk; and in memory of its own.
  for (const size_t part : {size_t{1024}, size_t{2112}, size_t{8192}}) {
    tcp.plan.chunk_bytes = part;
    const auto sessions = make_sessions(topology, kNodeChunk);
    const auto meshes = testing::make_meshes(6, tcp);
    run_ranks(6, [&](int rank) {
      const auto at = static_cast<size_t>(rank);
      sessions[at]->wait_attached(Deadline::after(seconds(30)), [] {});
      HierarchicalGroup group(topology, sessions[at], meshes[at], {});
      uint64_t seq = 0;
      for (const size_t count : {size_t{100}, size_t{3000}, size_t{20'000}, size_t{10'000}, size_t{1}}) {
        for (int again = 0; again < 6; ++again) {
          std::vector<float> data(count);
          for (size_t i = 0; i < count; ++i) data[i] = value(rank, i + seq);
          group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), data.data(), data.data(), count,
                           Reduction{ReduceKind::Avg, 6, 1.0});
          for (size_t i = 0; i < count; ++i) CHECK_EQ(data[i], ordered_average(6, node_of, i + seq));
          ++seq;
        }
      }
    });
  }
}

TEST(connections_are_made_between_nodes_only) {
  const Topology topology = topology_of(6, [](int r) { return r / 3; });
  const auto sessions = make_sessions(topology, 0);
  const auto meshes = testing::make_meshes(6);
  std::vector<size_t> connections(6);
  run_ranks(6, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    sessions[at]->wait_attached(Deadline::after(seconds(30)), [] {});
    HierarchicalGroup group(topology, sessions[at], meshes[at]);
    std::vector<float> data(1 << 18, 1.0f);
    group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data.data(), data.data(), data.size(),
                     Reduction{ReduceKind::Sum, 6, 1.0});
    group.barrier(call_of(Op::Barrier, DType::UInt8, 1));
    connections[at] = meshes[at]->connections();
    group.barrier(call_of(Op::Barrier, DType::UInt8, 2));
  });
  // One peer: a connection for control and one for data.
  for (const size_t count : connections) CHECK_EQ(count, size_t{2});
}

TEST(parts_of_another_group_are_refused) {
  const Topology topology = topology_of(2, [](int r) { return r; });
  const auto sessions = make_sessions(topology_of(2, [](int) { return 0; }), 0);
  const auto meshes = testing::make_meshes(2);
  CHECK_CONTAINS(CHECK_THROWS(Error, HierarchicalGroup(topology, sessions[0], meshes[0])), "rank 0 of 2");
}

}  // namespace
}  // namespace ours
