#include <atomic>
#include <cmath>
#include <cstring>
#include <mutex>
#include <thread>

#include "support/groups.h"
#include "support/reduce_reference.h"

// The algorithms for many nodes: doubling and rings. The table of algorithms makes few nodes use them, too.

namespace ours {
namespace {

using testing::call_of;
using testing::HierarchicalConfig;
using testing::make_hierarchical;
using testing::make_sessions;
using testing::run_ranks;
using testing::topology_of;

/// Nodes of two, three and one ranks in turn.
struct Nodes {
  explicit Nodes(int count) {
    for (int node = 0; node < count; ++node) {
      for (int i = 0; i < (node + 1) % 3 + 1; ++i) node_of.push_back(node);
    }
  }
  int ranks() const { return static_cast<int>(node_of.size()); }
  std::function<int(int)> function() const {
    return [this](int rank) { return node_of[static_cast<size_t>(rank)]; };
  }
  std::vector<int> node_of;
};

template <class E>
std::vector<char> encoded(int rank, size_t count, ReduceKind kind) {
  std::vector<char> bytes(count * sizeof(typename E::Stored));
  for (size_t i = 0; i < count; ++i) {
    const size_t mixed = i * 7 + static_cast<size_t>(rank) * 5;
    // Nothing is rounded, whatever the order.
    const auto value = static_cast<uint8_t>(kind == ReduceKind::Product ? 1 + (mixed % 11 == 0) : mixed % 4);
    const typename E::Stored stored = E::encode(static_cast<typename E::Value>(value));
    std::memcpy(&bytes[i * sizeof(stored)], &stored, sizeof(stored));
  }
  return bytes;
}

std::vector<char> input(DType dtype, int rank, size_t count, ReduceKind kind) {
  using testing::HalfComplexElement;
  using testing::HalfElement;
  using testing::NativeElement;
  switch (dtype) {
    case DType::Bool:
      return encoded<testing::BoolElement>(rank, count, kind);
    case DType::UInt8:
      return encoded<NativeElement<uint8_t>>(rank, count, kind);
    case DType::Int8:
      return encoded<NativeElement<int8_t>>(rank, count, kind);
    case DType::UInt16:
      return encoded<NativeElement<uint16_t>>(rank, count, kind);
    case DType::Int16:
      return encoded<NativeElement<int16_t>>(rank, count, kind);
    case DType::UInt32:
      return encoded<NativeElement<uint32_t>>(rank, count, kind);
    case DType::Int32:
      return encoded<NativeElement<int32_t>>(rank, count, kind);
    case DType::UInt64:
      return encoded<NativeElement<uint64_t>>(rank, count, kind);
    case DType::Int64:
      return encoded<NativeElement<int64_t>>(rank, count, kind);
    case DType::Float16:
      return encoded<HalfElement<10>>(rank, count, kind);
    case DType::BFloat16:
      return encoded<HalfElement<7>>(rank, count, kind);
    case DType::Float32:
      return encoded<NativeElement<float>>(rank, count, kind);
    case DType::Float64:
      return encoded<NativeElement<double>>(rank, count, kind);
    case DType::Complex32:
      return encoded<HalfComplexElement>(rank, count, kind);
    case DType::Complex64:
      return encoded<NativeElement<std::complex<float>>>(rank, count, kind);
    default:
      return encoded<NativeElement<std::complex<double>>>(rank, count, kind);
  }
}

HierarchicalConfig config_of(const std::string& rules, size_t chunk = 4096) {
  HierarchicalConfig config;
  config.chunk = chunk;
  config.rules = rules;
  return config;
}

/// Reductions of all kinds and types; every rank must get what the reference says.
void check_all_types(Group& group, size_t count, uint64_t& seq) {
  for (int number = 0; number <= static_cast<int>(DType::Complex128); ++number) {
    const auto dtype = static_cast<DType>(number);
    for (int which = 1; which <= static_cast<int>(ReduceKind::PremulSum); ++which) {
      const Reduction how{static_cast<ReduceKind>(which), group.size(), 0.5};
      if (!is_supported(how.kind, dtype)) continue;
      // These inputs are divided first, and rounded.
      const bool divided = dtype == DType::Float16 || dtype == DType::Complex32;
      if (how.kind == ReduceKind::Avg && divided) continue;
      std::vector<std::vector<char>> inputs;
      std::vector<const char*> sources;
      for (int r = 0; r < group.size(); ++r) inputs.push_back(input(dtype, r, count, how.kind));
      for (const auto& one : inputs) sources.push_back(one.data());
      std::vector<char> expected(count * size_of(dtype));
      testing::reference_reduce(expected.data(), sources, count, dtype, how);
      std::vector<char> data = inputs[static_cast<size_t>(group.rank())];
      group.all_reduce(call_of(Op::AllReduce, dtype, seq++), data.data(), data.data(), count, how);
      CHECK(data == expected);
    }
  }
}

TEST(many_nodes_reduce_all_types_by_doubling_and_around_rings) {
  for (const char* rules : {"all doubling", "all ring"}) {
    for (const int count : {2, 5, 9}) {
      const Nodes nodes(count);
      const auto makers = make_hierarchical(nodes.ranks(), nodes.function(), config_of(rules));
      run_ranks(nodes.ranks(), [&](int rank) {
        const auto group = makers[static_cast<size_t>(rank)]();
        uint64_t seq = 0;
        for (const size_t elements : {size_t{3}, size_t{700}}) check_all_types(*group, elements, seq);
      });
    }
  }
}

float odd_value(int rank, size_t i) { return 1.0f / static_cast<float>(i * 3 + static_cast<size_t>(rank) * 7 + 1); }

/// All ranks must have the same bits, whatever is rounded; returns the results of rank 0.
std::vector<std::vector<float>> check_same_bits(const Nodes& nodes, const HierarchicalConfig& config, bool in_heap) {
  constexpr size_t kCounts[] = {0, 1, 17, 1000, 20011};
  const auto makers = make_hierarchical(nodes.ranks(), nodes.function(), config);
  std::vector<std::vector<std::vector<float>>> results(static_cast<size_t>(nodes.ranks()));
  run_ranks(nodes.ranks(), [&](int rank) {
    const auto group = makers[static_cast<size_t>(rank)]();
    uint64_t seq = 0;
    for (const size_t count : kCounts) {
      std::vector<float> own(count);
      const auto heap = in_heap ? group->allocate(count * sizeof(float) + 1) : nullptr;
      auto* const data = heap ? static_cast<float*>(heap.get()) : own.data();
      for (size_t i = 0; i < count; ++i) data[i] = odd_value(rank, i);
      group->all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data, data, count,
                        Reduction{ReduceKind::Avg, group->size(), 1.0});
      results[static_cast<size_t>(rank)].emplace_back(data, data + count);
      // The result goes to each rank in turn, from another buffer.
      const int root = static_cast<int>(seq) % group->size();
      std::vector<float> in(count), out(count, -1.0f);
      for (size_t i = 0; i < count; ++i) in[i] = static_cast<float>((i + static_cast<size_t>(rank)) % 13);
      group->reduce(call_of(Op::Reduce, DType::Float32, seq++), in.data(), out.data(), count,
                    Reduction{ReduceKind::Sum, group->size(), 1.0}, root);
      for (size_t i = 0; i < count; ++i) {
        float sum = 0;
        for (size_t r = 0; r < static_cast<size_t>(group->size()); ++r) sum += static_cast<float>((i + r) % 13);
        CHECK_EQ(out[i], rank == root ? sum : -1.0f);
      }
    }
  });
  for (const auto& result : results) CHECK(result == results[0]);
  for (size_t which = 0; which < results[0].size(); ++which) {
    for (size_t i = 0; i < results[0][which].size(); ++i) {
      double sum = 0;
      for (int r = 0; r < nodes.ranks(); ++r) sum += static_cast<double>(odd_value(r, i));
      CHECK(std::fabs(static_cast<double>(results[0][which][i]) * nodes.ranks() - sum) <= 1e-6 * sum);
    }
  }
  return results[0];
}

TEST(many_nodes_get_the_same_bits_on_all_ranks) {
  for (const char* rules : {"all bytes<=4K doubling;all ring", "all doubling", "all ring"}) {
    for (int count = 2; count <= 9; ++count) {
      check_same_bits(Nodes(count), config_of(rules), count % 2 == 0);
    }
  }
  // The default chunks, and one stream fewer.
  HierarchicalConfig config = config_of("all ring", 0);
  config.streams = 1;
  check_same_bits(Nodes(4), config, false);
  config.rails = 1;
  check_same_bits(Nodes(5), config, true);
}

TEST(a_ring_adds_up_in_another_order_only_among_three_nodes_and_more) {
  const auto two = check_same_bits(Nodes(2), config_of("all ring"), false);
  CHECK(two == check_same_bits(Nodes(2), config_of("all direct"), false));
  const auto four = check_same_bits(Nodes(4), config_of("all ring"), false);
  CHECK(four != check_same_bits(Nodes(4), config_of("all direct"), false));
}

TEST(halves_on_the_wire_go_directly) {
  HierarchicalConfig config = config_of("all ring");
  config.wire = WireType::BFloat16;
  std::mutex mutex;
  std::vector<std::vector<float>> results;
  for (const char* rules : {"all ring", "all direct"}) {
    config.rules = rules;
    const auto makers = make_hierarchical(4, [](int r) { return r; }, config);
    run_ranks(4, [&](int rank) {
      const auto group = makers[static_cast<size_t>(rank)]();
      std::vector<float> data(30001);
      for (size_t i = 0; i < data.size(); ++i) data[i] = odd_value(rank, i);
      group->all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data.data(), data.data(), data.size(),
                        Reduction{ReduceKind::Sum, 4, 1.0});
      const std::lock_guard<std::mutex> lock(mutex);
      results.push_back(data);
    });
  }
  for (const auto& result : results) CHECK(result == results[0]);
}

/// The connections of each rank after calls of all sizes, on that many nodes with two ranks each.
std::vector<size_t> connections_of(int nodes, const std::string& rules) {
  const int ranks = 2 * nodes;
  const Topology topology = topology_of(ranks, [](int r) { return r / 2; });
  const auto sessions = make_sessions(topology, 4096);
  TcpConfig config = testing::loopback_config();
  config.plan.chunk_bytes = 4096;
  config.plan.rules = rules;
  const auto meshes = testing::make_meshes(ranks, config);
  std::vector<size_t> connections(static_cast<size_t>(ranks));
  std::atomic<int> counted{0};
  run_ranks(ranks, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    sessions[at]->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
    HierarchicalGroup group(topology, sessions[at], meshes[at]);
    uint64_t seq = 0;
    for (const size_t count : {size_t{5000}, size_t{100000}}) {
      std::vector<float> data(count, 1.0f);
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq++), data.data(), data.data(), count,
                       Reduction{ReduceKind::Sum, ranks, 1.0});
      for (const float x : data) CHECK_EQ(x, static_cast<float>(ranks));
    }
    connections[at] = meshes[at]->connections();
    // A barrier would make further connections.
    ++counted;
    while (counted < ranks) std::this_thread::yield();
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
  const std::string rules = "all bytes<=1K doubling;all bytes<=64K ring;all direct";
  for (const size_t odd : {size_t{10}, size_t{10000}, size_t{30000}}) {
    for (const size_t even : {size_t{10}, size_t{10000}, size_t{30000}}) {
      if (odd == even) continue;
      const auto makers = make_hierarchical(12, [](int r) { return r / 2; }, config_of(rules));
      run_ranks(12, [&](int rank) {
        const auto group = makers[static_cast<size_t>(rank)]();
        const size_t count = rank / 2 == 3 ? odd : even;
        std::vector<float> data(count, 5.0f);
        const std::string message =
            CHECK_THROWS(MismatchError, group->all_reduce(call_of(Op::AllReduce, DType::Float32, 0), data.data(),
                                                          data.data(), count, Reduction{ReduceKind::Sum, 12, 1.0}));
        CHECK_CONTAINS(message, std::to_string(odd) + " x float32");
        CHECK_CONTAINS(message, std::to_string(even) + " x float32");
        for (const float x : data) CHECK_EQ(x, 5.0f);
      });
    }
  }
}

}  // namespace
}  // namespace ours
