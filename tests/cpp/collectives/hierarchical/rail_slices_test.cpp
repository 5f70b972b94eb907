#include "collectives/hierarchical/rail_slices.h"

#include <algorithm>
#include <atomic>
#include <tuple>

#include "support/engine_ranks.h"
#include "support/hierarchical_ranks.h"

// How many messages of which sizes a long reduction sends between nodes: as worked out, for more ranks than there are
// here, and as sent by small groups.

namespace ours::testing {
namespace {

constexpr size_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr size_t kPart = 8 * kKiB, kPartOfRing = 16 * kKiB;

/// For an array of float32, with the default chunks.
RailSlices rails_for(size_t bytes, int ranks, int nodes, bool ring = false) {
  return choose_rails({bytes / 4, 4, 4, nodes, ranks, ring ? Algorithm::Ring : Algorithm::Direct});
}

/// The bytes of the shortest and of the longest part.
std::pair<size_t, size_t> parts_of(const RailSlices& slices, int nodes) {
  size_t least = SIZE_MAX, most = 0;
  for (size_t chunk = 0; chunk < slices.chunks; ++chunk) {
    for (int rail = 0; rail < slices.rails; ++rail) {
      // The first parts are the longer ones.
      most = std::max(most, slices.part_of(chunk, rail, 0, nodes).size() * 4);
      least = std::min(least, slices.part_of(chunk, rail, nodes - 1, nodes).size() * 4);
    }
  }
  return {least, most};
}

TEST(messages_between_nodes_are_worth_it) {
  struct Row {
    int ranks, nodes;
    size_t bytes;
    int rails;
    size_t messages;  ///< that a rail's rank sends
    size_t least;     ///< bytes of the shortest
  };
  // Otherwise 64 x 32 ranks would send 25 MiB in parts of 256 bytes, 3,100 from each rank.
  constexpr Row kRows[] = {
      {64, 32, 64 * kKiB, 1, 62, 2048},      {64, 32, kMiB, 3, 62, 10880},       {64, 32, 25 * kMiB, 21, 248, 9728},
      {64, 32, 100 * kMiB, 64, 372, 8512},   {8, 2, 64 * kKiB, 2, 2, 16384},     {8, 2, 25 * kMiB, 8, 100, 32768},
      {8, 32, 25 * kMiB, 8, 744, 8512},      {128, 2, 25 * kMiB, 128, 24, 8512}, {128, 128, 25 * kMiB, 8, 762, 8512},
      {128, 1024, 25 * kMiB, 3, 2046, 8512}, {64, 128, 64 * kKiB, 1, 254, 512},  {64, 128, 25 * kMiB, 8, 762, 8512},
  };
  for (const Row& row : kRows) {
    const RailSlices slices = rails_for(row.bytes, row.ranks, row.nodes);
    CHECK_EQ(slices.rails, row.rails);
    CHECK_EQ(2 * slices.chunks * static_cast<size_t>(row.nodes - 1), row.messages);
    CHECK_EQ(parts_of(slices, row.nodes).first, row.least);
  }
}

TEST(a_rail_for_every_rank_would_send_messages_that_are_not) {
  struct Row {
    int ranks, nodes;
    size_t bytes;
    size_t messages;
    size_t most;  ///< bytes of the longest
  };
  constexpr Row kRows[] = {
      {64, 32, 64 * kKiB, 62, 64},       {64, 32, kMiB, 124, 256},       {64, 32, 25 * kMiB, 3100, 256},
      {64, 32, 100 * kMiB, 12400, 256},  {8, 32, 25 * kMiB, 3100, 2048}, {64, 128, 25 * kMiB, 12700, 64},
      {8, 2, 25 * kMiB, 100, 32 * kKiB},
  };
  for (const Row& row : kRows) {
    const RailSlices slices{row.bytes / 4, piece_count(row.bytes, 512 * kKiB), row.ranks, 16};
    CHECK_EQ(2 * slices.chunks * static_cast<size_t>(row.nodes - 1), row.messages);
    CHECK_EQ(parts_of(slices, row.nodes).second, row.most);
  }
}

TEST(parts_are_short_only_if_a_single_rail_would_not_make_them_longer) {
  for (const int ranks : {1, 2, 3, 8, 61, 64, 128}) {
    for (const int nodes : {2, 3, 4, 31, 32, 128, 449, 1024}) {
      for (const size_t bytes : {size_t{4}, 100 * size_t{4}, 64 * kKiB, 100'000 * size_t{4}, kMiB, 7 * kMiB + 4,
                                 25 * kMiB, 100 * kMiB + 28}) {
        for (const bool ring : {false, true}) {
          const size_t part = ring ? kPartOfRing : kPart;
          const RailSlices slices = rails_for(bytes, ranks, nodes, ring);
          CHECK(slices.rails >= 1 && slices.rails <= ranks && slices.chunks >= 1);
          const auto [least, most] = parts_of(slices, nodes);
          const bool enough = bytes >= static_cast<size_t>(nodes) * (part + 64);
          if (enough) {
            CHECK(least >= part);
          } else {
            CHECK(slices.rails == 1 && slices.chunks == 1);
          }
          // A rail's slot is no larger than a chunk of one rail, or than such parts make it.
          CHECK(most <= 64 + std::max(512 * kKiB / static_cast<size_t>(nodes), 2 * part));
          // Fewer ranks are idle than help one rail.
          CHECK(ranks % slices.rails == 0 || ranks % slices.rails < ranks / slices.rails);
          size_t elements = 0;
          for (size_t chunk = 0; chunk < slices.chunks; ++chunk) {
            for (int rail = 0; rail < slices.rails; ++rail) {
              CHECK_EQ(slices.of(chunk, rail).begin, elements);
              elements = slices.of(chunk, rail).end;
            }
          }
          CHECK_EQ(elements, bytes / 4);
        }
      }
    }
  }
}

using Sent = std::tuple<int, int, size_t>;  // from, to, bytes

/// What a group of `nodes` nodes with `ranks` ranks each sends in an all_reduce of `count` elements of float32, each
/// node of which does it in the given way.
std::vector<Sent> worked_out(const RailSlices& slices, int nodes, int ranks, bool ring) {
  std::vector<Sent> all;
  const auto send = [&](size_t chunk, int rail, int from, int to, int part) {
    const size_t bytes = slices.part_of(chunk, rail, part, nodes).size() * 4;
    if (bytes != 0) all.emplace_back(from * ranks + rail, to * ranks + rail, bytes);
  };
  for (size_t chunk = 0; chunk < slices.chunks; ++chunk) {
    for (int rail = 0; rail < slices.rails; ++rail) {
      for (int node = 0; node < nodes; ++node) {
        for (int i = 1; i < nodes; ++i) {
          const int next = (node + 1) % nodes, other = (node + i) % nodes;
          // Its input of the other's part, and the result of its own; around a ring, all parts but one, twice.
          send(chunk, rail, node, ring ? next : other, other);
          send(chunk, rail, node, ring ? next : other, ring ? (other + 1) % nodes : node);
        }
      }
    }
  }
  std::sort(all.begin(), all.end());
  return all;
}

TEST(a_group_sends_the_messages_that_were_worked_out) {
  constexpr int kNodes = 3, kRanks = 4;
  constexpr size_t kWireChunk = 4096;  // so chunks of 8 KiB, and parts of 128 bytes, or 256 around a ring
  for (const bool ring : {false, true}) {
    for (const size_t count : {size_t{40}, size_t{200}, size_t{1000}, size_t{10000}, size_t{50001}}) {
      for (const bool in_heap : {false, true}) {
        HierarchicalConfig config;
        config.chunk = kWireChunk;
        config.rules = ring ? "all ring" : "all direct";
        HierarchicalRanks ranks(kNodes * kRanks, [](int r) { return r / kRanks; }, config);
        const auto board = connect_engines(ranks.meshes, false, 1);
        ranks.run([&](HierarchicalGroup& group) {
          std::vector<float> own(count);
          const auto heap = in_heap ? group.allocate(count * sizeof(float)) : nullptr;
          auto* const data = in_heap ? static_cast<float*>(heap.get()) : own.data();
          for (size_t i = 0; i < count; ++i) data[i] = value(group.rank(), i);
          group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data, data, count,
                           Reduction{ReduceKind::Sum, kNodes * kRanks, 1.0});
          for (size_t i = 0; i < count; ++i) {
            float expected = 0;
            for (int r = 0; r < kNodes * kRanks; ++r) expected += value(r, i);
            CHECK_EQ(data[i], expected);
          }
        });
        const RailCase array{count, 4, 4, kNodes, kRanks, ring ? Algorithm::Ring : Algorithm::Direct, kWireChunk};
        const RailSlices slices = choose_rails(array);
        std::vector<Sent> sent = board->sent();
        std::sort(sent.begin(), sent.end());
        CHECK(sent == worked_out(slices, kNodes, kRanks, ring));
        const bool enough = count * 4 >= kNodes * (array.least_part() + 64);
        for (const auto& [from, to, bytes] : sent) CHECK(!enough || bytes >= array.least_part());
      }
    }
  }
}

TEST(ranks_without_a_rail_help_those_that_have_one) {
  constexpr int kRanks = 10;
  // Nodes have different numbers of ranks, and chunks longer and shorter than those between nodes.
  const NodeOf uneven = [](int r) { return r < 5 ? 0 : r < 7 ? 1 : 2; };
  for (const NodeOf& node_of : {uneven, NodeOf([](int r) { return r / 5; })}) {
    for (const size_t chunk : {size_t{4096}, size_t{65536}}) {
      for (const bool ring : {false, true}) {
        HierarchicalConfig config;
        config.chunk = chunk;
        config.wire_chunk = 8192;
        config.limits.rails = ring ? 1 : 2;
        config.rules = ring ? "all ring" : "all direct";
        HierarchicalRanks(kRanks, node_of, config).run([&](HierarchicalGroup& group) {
          uint64_t seq = 0;
          for (const size_t count : {size_t{1}, size_t{3001}, size_t{30'000}, size_t{30'000}, size_t{500}}) {
            const auto heap = group.allocate(count * sizeof(float));
            std::vector<float> own(count);
            // All ranks' data is in the heap, that of some, and that of none.
            for (const bool in_heap : {true, group.rank() % 2 == 0, false}) {
              auto* const data = in_heap ? static_cast<float*>(heap.get()) : own.data();
              for (size_t i = 0; i < count; ++i) data[i] = value(group.rank(), i);
              group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data, data, count,
                               Reduction{ReduceKind::Sum, kRanks, 1.0});
              for (size_t i = 0; i < count; ++i) {
                float expected = 0;
                for (int r = 0; r < kRanks; ++r) expected += value(r, i);
                CHECK_EQ(data[i], expected);
              }
            }
          }
        });
      }
    }
  }
}

}  // namespace
}  // namespace ours::testing
