#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "support/held_write.h"
#include "support/hierarchical_ranks.h"

// A rank stops in the middle of writing a result into its peers' tensors, and goes on after they have given up on it
// and use their tensors for something else.

namespace ours::testing {
namespace {

using Groups = std::vector<std::shared_ptr<Group>>;

constexpr size_t kCount = size_t{1} << 20;
constexpr size_t kBytes = (kCount + 100) * sizeof(float);
constexpr int kVictim = 0;
constexpr int kWriter = 1;

/// A rank's tensor, in two pieces; neither begins or ends with a page.
struct Tensor {
  explicit Tensor(Group& group)
      : memory(group.allocate(kBytes)),
        data(static_cast<float*>(memory.get())),
        pieces{span(3, 5001), span(7000, kCount)} {
    fill(1);
  }

  void fill(float value) const { std::fill(data, data + kBytes / sizeof(float), value); }
  bool is(float value) const {
    return std::all_of(data, data + kBytes / sizeof(float), [&](float x) { return x == value; });
  }

  std::shared_ptr<void> memory;
  float* data;
  std::vector<Span> pieces;

 private:
  Span span(size_t from, size_t to) const { return {data + from, (to - from) * sizeof(float)}; }
};

/// The ranks 0 to `shared` - 1 share a node.
void check_late_writer(const Groups& groups, const Sessions& sessions, int shared) {
  const auto ranks = static_cast<int>(groups.size());
  std::vector<uint64_t> offsets(groups.size());
  std::atomic<int> ready{0}, refilled{0};
  std::atomic<bool> held{false}, over{false};

  const auto be_rank = [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    const Tensor tensor(*groups[r]);
    offsets[r] = sessions[r]->heap().offset_of(tensor.data, kBytes);
    ++ready;
    wait_until([&] { return held.load(); });
    CHECK_THROWS(AbortedError, groups[r]->all_reduce(call_of(Op::AllReduce, DType::Float32, 0), tensor.pieces,
                                                     Reduction{ReduceKind::Sum, ranks, 1.0}));
    if (rank == kWriter) {
      over = true;
    } else {
      tensor.fill(7);
      ++refilled;
      wait_until([&] { return over.load(); });
      CHECK(tensor.is(7));
    }
  };
  const auto stop_and_go_on = [&] {
    wait_until([&] { return ready == ranks; });
    const auto first_write = [&](int of, int to) {
      std::byte* const data = sessions[static_cast<size_t>(of)]->heap().at(to, offsets[static_cast<size_t>(to)]);
      return std::make_unique<HeldWrite>(data, (kBytes + 4095) / 4096 * 4096);
    };
    const auto late = first_write(kWriter, kVictim);
    // The others leave some work for the writer.
    std::vector<std::unique_ptr<HeldWrite>> others;
    for (int r = 0; r < shared; ++r) {
      if (r != kWriter) others.push_back(first_write(r, kWriter));
    }
    held = true;
    wait_until([&] { return late->reached(); });
    groups[kVictim]->abort("enough");
    for (const auto& other : others) other->go_on();
    wait_until([&] { return refilled == ranks - 1; });
    late->go_on();
    wait_until([&] { return over.load(); });
  };
  run_ranks(ranks + 1, [&](int rank) { rank < ranks ? be_rank(rank) : stop_and_go_on(); });
}

Groups groups_of(const Sessions& sessions) {
  Groups groups;
  for (const auto& session : sessions) groups.push_back(std::make_shared<NodeGroup>(session));
  return groups;
}

TEST(a_late_writer_within_a_node_reaches_nobodys_tensors) {
  for (int ranks : {2, 3}) {
    const Sessions sessions = make_sessions(ranks, 0);
    check_late_writer(groups_of(sessions), sessions, ranks);
  }
}

TEST(a_late_writer_of_a_domain_that_fetches_results_reaches_nobodys_tensors) {
  const Sessions sessions = make_sessions(4, 0, {true, 2});
  check_late_writer(groups_of(sessions), sessions, 4);
}

TEST(a_late_writer_among_several_nodes_reaches_nobodys_tensors) {
  const HierarchicalRanks ranks(4, [](int r) { return r / 2; });
  Groups groups;
  for (int rank = 0; rank < 4; ++rank) groups.push_back(ranks.group(rank));
  check_late_writer(groups, ranks.sessions, 2);
}

// Only some tensors are in the heap, so all ranks' data goes through other memory.
TEST(tensors_that_no_peer_writes_to_stay_shared_when_a_reduction_fails) {
  const Sessions sessions = make_sessions(2, 0);
  const Groups groups = groups_of(sessions);
  std::vector<float> ordinary(kCount);
  auto* const page = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(ordinary.data()) + 4095) / 4096 * 4096);
  std::atomic<bool> held{false};
  std::atomic<int> joined{0};
  run_ranks(3, [&](int rank) {
    if (rank == 2) {
      wait_until([&] { return joined == 2; });
      HeldWrite write(page, kCount * sizeof(float) / 4096 * 4096 - 4096);
      held = true;
      wait_until([&] { return write.reached(); });
      groups[0]->abort("enough");
      return write.go_on();
    }
    const auto& session = sessions[static_cast<size_t>(rank)];
    const auto& group = groups[static_cast<size_t>(rank)];
    const auto memory = group->allocate(kCount * sizeof(float));
    auto* const data = rank == 0 ? static_cast<float*>(memory.get()) : ordinary.data();
    std::fill_n(data, kCount, 1.0F);
    ++joined;
    wait_until([&] { return held.load(); });
    CHECK_THROWS(AbortedError, group->all_reduce(call_of(Op::AllReduce, DType::Float32, 0),
                                                 std::vector<Span>{{data, kCount * sizeof(float)}},
                                                 Reduction{ReduceKind::Sum, 2, 1.0}));
    if (rank == 1) return;
    const uint64_t offset = session->heap().offset_of(data, kCount * sizeof(float));
    reinterpret_cast<std::atomic<float>*>(sessions[1]->heap().at(0, offset))->store(5);
    CHECK_EQ(data[0], 5.0F);
  });
}

}  // namespace
}  // namespace ours::testing
