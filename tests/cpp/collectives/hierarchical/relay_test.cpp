#include <algorithm>
#include <atomic>

#include "support/engine_ranks.h"
#include "support/hierarchical_ranks.h"
#include "support/patience.h"

// gather, scatter and all_to_all through one rank of each other node. The contract of groups runs over them as well
// (support/groups.cpp).

namespace ours::testing {
namespace {

const NodeOf kFours = [](int r) { return r / 4; };
/// Nodes of five, two, one and two ranks, whose ranks do not follow one another.
const NodeOf kUneven = [](int r) { return r < 8 && r % 2 == 0 ? 0 : r == 9 ? 0 : r < 4 ? 1 : r == 5 ? 2 : 3; };

/// Long messages go directly between ranks that have at most so many others on other nodes.
HierarchicalConfig relays(int most_peers = 0, int streams = 2) {
  HierarchicalConfig config;
  config.limits.most_peers = most_peers;
  config.streams = streams;
  return config;
}

/// What `from` has for `to`, of sizes that differ by pair.
std::vector<uint32_t> message(int from, int to, size_t scale) {
  const auto count = static_cast<size_t>((from * 7 + to * 3) % 5) * scale + static_cast<size_t>(from + to) % 2;
  std::vector<uint32_t> data(count);
  for (size_t i = 0; i < count; ++i) data[i] = static_cast<uint32_t>(i * 100 + static_cast<size_t>(from * 10 + to));
  return data;
}

std::vector<std::vector<uint32_t>> messages(int self, int size, size_t scale, bool sent) {
  std::vector<std::vector<uint32_t>> all;
  for (int r = 0; r < size; ++r) all.push_back(sent ? message(self, r, scale) : message(r, self, scale));
  return all;
}

void all_to_all(Group& group, uint64_t seq, const std::vector<std::vector<uint32_t>>& in,
                std::vector<std::vector<uint32_t>>& out, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  std::vector<ConstSpan> inputs;
  std::vector<Span> outputs;
  for (const auto& one : in) inputs.push_back(const_span(one));
  for (auto& one : out) outputs.push_back(span(one));
  group.all_to_all(call_of(Op::AllToAll, DType::Int32, seq, timeout), inputs, outputs);
}

void check_all(Group& group, uint64_t seq, size_t scale) {
  const int size = group.size(), me = group.rank();
  const auto expected = messages(me, size, scale, false);
  auto out = expected;
  for (auto& one : out) std::fill(one.begin(), one.end(), 0u);
  all_to_all(group, seq, messages(me, size, scale, true), out);
  for (size_t r = 0; r < out.size(); ++r) CHECK(out[r] == expected[r]);
}

TEST(relays_hand_on_messages_of_all_sizes) {
  for (const NodeOf& node_of : {kFours, kUneven}) {
    // Several sources share a round; each has one of its own; and messages are so long that they travel alone, or
    // directly.
    for (const int most_peers : {0, 9}) {
      HierarchicalConfig config = relays(most_peers);
      config.chunk = most_peers == 0 ? 4096 : 0;
      HierarchicalRanks(10, node_of, config).run([](HierarchicalGroup& group) {
        uint64_t seq = 0;
        for (const size_t scale : {size_t{0}, size_t{3}, size_t{700}, size_t{5000}, size_t{20'000}, size_t{3}}) {
          check_all(group, seq++, scale);
        }
      });
    }
  }
}

TEST(relays_serve_one_root) {
  for (const NodeOf& node_of : {kFours, kUneven}) {
    HierarchicalRanks(10, node_of, relays()).run([](HierarchicalGroup& group) {
      uint64_t seq = 0;
      const int size = group.size(), me = group.rank();
      for (const size_t scale : {size_t{2}, size_t{30'000}}) {
        for (const int root : {0, 3, 9}) {
          const auto expected = messages(root, size, scale, false);
          std::vector<std::vector<uint32_t>> out = expected;
          std::vector<Span> outputs;
          for (auto& one : out) {
            std::fill(one.begin(), one.end(), 0u);
            outputs.push_back(span(one));
          }
          const auto own = message(me, root, scale);
          group.gather(call_of(Op::Gather, DType::Int32, seq++), const_span(own), outputs, root);
          if (me == root) CHECK(out == expected);

          const auto all = messages(root, size, scale, true);
          std::vector<ConstSpan> inputs;
          for (const auto& one : all) inputs.push_back(const_span(one));
          std::vector<uint32_t> got(all[static_cast<size_t>(me)].size());
          group.scatter(call_of(Op::Scatter, DType::Int32, seq++), inputs, span(got), root);
          CHECK(got == all[static_cast<size_t>(me)]);
        }
      }
    });
  }
}

TEST(relays_work_in_place) {
  HierarchicalRanks(8, kFours, relays()).run([](HierarchicalGroup& group) {
    uint64_t seq = 0;
    for (const size_t count : {size_t{5}, size_t{30'000}}) {
      std::vector<std::vector<uint32_t>> data;
      for (int to = 0; to < 8; ++to) data.emplace_back(count, static_cast<uint32_t>(group.rank() * 8 + to));
      all_to_all(group, seq++, data, data);
      for (int from = 0; from < 8; ++from) {
        for (const uint32_t x : data[static_cast<size_t>(from)]) {
          CHECK_EQ(x, static_cast<uint32_t>(from * 8 + group.rank()));
        }
      }
    }
  });
}

/// The connections of each of 12 ranks on three nodes after messages of about that many numbers.
std::vector<size_t> connections_after(size_t scale, int most_peers) {
  const HierarchicalRanks ranks(12, kFours, relays(most_peers, 1));
  std::vector<size_t> connections(12);
  std::atomic<int> counted{0};
  ranks.run([&](HierarchicalGroup& group) {
    const auto at = static_cast<size_t>(group.rank());
    check_all(group, 0, scale);
    const std::vector<uint32_t> one{1};
    std::vector<uint32_t> all(12), got(1);
    std::vector<Span> parts;
    const std::vector<ConstSpan> same(12, const_span(one));
    for (uint32_t& x : all) parts.push_back({&x, sizeof x});
    group.gather(call_of(Op::Gather, DType::Int32, 1), const_span(one), parts, 5);
    group.scatter(call_of(Op::Scatter, DType::Int32, 2), same, span(got), 6);
    connections[at] = ranks.meshes[at]->connections();
    // A barrier would make further connections.
    ++counted;
    wait_until([&] { return counted == 12; });
  });
  return connections;
}

TEST(a_rank_needs_one_connection_for_each_other_node) {
  // One for control and one for data to each of two nodes.
  for (const size_t count : connections_after(100, 100)) CHECK_EQ(count, size_t{4});
  for (const size_t count : connections_after(20'000, 0)) CHECK_EQ(count, size_t{4});
  for (const size_t count : connections_after(20'000, 100)) CHECK(count > 4);
}

TEST(relays_send_few_messages) {
  constexpr int kRanks = 8;
  constexpr size_t kBytes = 1000;
  HierarchicalRanks ranks(kRanks, kFours, relays());
  const auto board = connect_engines(ranks.meshes, false, 1);
  ranks.run([](HierarchicalGroup& group) {
    std::vector<char> in(kRanks * kBytes, 'x'), out(kRanks * kBytes);
    std::vector<ConstSpan> inputs;
    std::vector<Span> outputs;
    for (size_t r = 0; r < kRanks; ++r) {
      inputs.push_back({in.data() + r * kBytes, kBytes});
      outputs.push_back({out.data() + r * kBytes, kBytes});
    }
    group.all_to_all(call_of(Op::AllToAll, DType::Int8, 0), inputs, outputs);
    CHECK(in == out);
  });
  // From each rank to its relay: the sizes, and the messages for its four ranks in one.
  size_t sizes = 0, payloads = 0;
  for (const auto& [from, to, bytes] : board->sent()) {
    CHECK_EQ(std::abs(from - to), 4);
    sizes += bytes == 4 * sizeof(uint64_t) ? 1 : 0;
    payloads += bytes == 4 * kBytes ? 1 : 0;
  }
  CHECK_EQ(board->sent().size(), size_t{2 * kRanks});
  CHECK(sizes == kRanks && payloads == kRanks);
}

TEST(relays_find_sizes_that_disagree_before_anything_is_written) {
  for (const NodeOf& node_of : {kFours, kUneven}) {
    // Between nodes, and within one.
    for (const int to : {1, 2, 7}) {
      HierarchicalRanks(10, node_of, relays()).run([&](HierarchicalGroup& group) {
        const int me = group.rank();
        std::vector<std::vector<uint32_t>> in(10, std::vector<uint32_t>(10, 1)), out(10, std::vector<uint32_t>(10, 9));
        if (me == 0) in[static_cast<size_t>(to)].resize(11);
        const std::string message = CHECK_THROWS(MismatchError, all_to_all(group, 0, in, out));
        CHECK_CONTAINS(message, "rank 0 (host ");
        CHECK_CONTAINS(message, "sends 44 bytes to rank " + std::to_string(to) + " (host ");
        CHECK_CONTAINS(message, "which expects 40, in all_to_all number 0");
        for (int from = 0; from < 10; ++from) {
          if (from == me) continue;
          for (const uint32_t x : out[static_cast<size_t>(from)]) CHECK_EQ(x, 9u);
        }
      });
    }
  }
}

TEST(a_rank_that_relays_wait_for_is_named_on_all_nodes) {
  for (const int absent : {3, 6}) {
    with_growing_timeouts([&](std::chrono::milliseconds timeout) {
      HierarchicalRanks(8, kFours, relays()).run([&](HierarchicalGroup& group) {
        check_all(group, 0, 10);
        if (group.rank() == absent) return wait_until([&] { return !group.failure().empty(); });
        std::vector<std::vector<uint32_t>> in(8, std::vector<uint32_t>(10, 1)), out = in;
        const std::string message = CHECK_THROWS(TimeoutError, all_to_all(group, 1, in, out, timeout));
        CHECK_CONTAINS(message, " for rank " + std::to_string(absent) + " (host ");
        CHECK(message.find("), rank") == std::string::npos);
      });
    });
  }
}

}  // namespace
}  // namespace ours::testing
