#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "support/held_write.h"
#include "support/hierarchical_ranks.h"

// A rank stops in the middle of writing a result into its peers' tensors, and goes on after they have given up on it
// and use their tensors for something else.

namespace ours {
namespace {

using testing::call_of;
using testing::HeldWrite;
using testing::run_ranks;

using Makers = std::vector<std::function<std::shared_ptr<Group>()>>;
using Sessions = std::vector<std::shared_ptr<NodeSession>>;

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

/// `sessions` are those of the ranks 0 to `shared` - 1, which share a node.
void check_late_writer(const Makers& makers, const Sessions& sessions, int shared) {
  const auto ranks = static_cast<int>(makers.size());
  std::vector<std::shared_ptr<Group>> groups(makers.size());
  std::vector<uint64_t> offsets(makers.size());
  std::atomic<int> ready{0}, refilled{0};
  std::atomic<bool> held{false}, over{false};
  const auto wait_for = [](const std::function<bool()>& state) {
    while (!state()) std::this_thread::yield();
  };

  const auto be_rank = [&](int rank) {
    const auto r = static_cast<size_t>(rank);
    groups[r] = makers[r]();
    const Tensor tensor(*groups[r]);
    offsets[r] = sessions[r]->heap()->offset_of(tensor.data, kBytes);
    ++ready;
    wait_for([&] { return held.load(); });
    CHECK_THROWS(AbortedError, groups[r]->all_reduce(call_of(Op::AllReduce, DType::Float32, 0), tensor.pieces,
                                                     Reduction{ReduceKind::Sum, ranks, 1.0}));
    if (rank == kWriter) {
      over = true;
    } else {
      tensor.fill(7);
      ++refilled;
      wait_for([&] { return over.load(); });
      CHECK(tensor.is(7));
    }
  };
  const auto stop_and_go_on = [&] {
    wait_for([&] { return ready == ranks; });
    const auto first_write = [&](int of, int to) {
      std::byte* const data = sessions[static_cast<size_t>(of)]->heap()->at(to, offsets[static_cast<size_t>(to)]);
      return std::make_unique<HeldWrite>(data, (kBytes + 4095) / 4096 * 4096);
    };
    const auto late = first_write(kWriter, kVictim);
    // The others leave some work for the writer.
    std::vector<std::unique_ptr<HeldWrite>> others;
    for (int r = 0; r < shared; ++r) {
      if (r != kWriter) others.push_back(first_write(r, kWriter));
    }
    held = true;
    wait_for([&] { return late->reached(); });
    groups[kVictim]->abort("enough");
    for (const auto& other : others) other->go_on();
    wait_for([&] { return refilled == ranks - 1; });
    late->go_on();
    wait_for([&] { return over.load(); });
  };
  run_ranks(ranks + 1, [&](int rank) { rank < ranks ? be_rank(rank) : stop_and_go_on(); });
}

TEST(a_late_writer_within_a_node_reaches_nobodys_tensors) {
  for (int ranks : {2, 3}) {
    const Topology topology = testing::topology_of(ranks, [](int) { return 0; });
    const Sessions sessions = testing::make_sessions(topology, 0);
    Makers makers;
    for (const auto& session : sessions) {
      makers.emplace_back([session] {
        session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
        return std::make_shared<NodeGroup>(session);
      });
    }
    check_late_writer(makers, sessions, ranks);
  }
}

TEST(a_late_writer_among_several_nodes_reaches_nobodys_tensors) {
  const Topology topology = testing::topology_of(4, [](int r) { return r / 2; });
  const Sessions sessions = testing::make_sessions(topology, 0);
  const auto meshes = testing::make_meshes(4);
  Makers makers;
  for (size_t r = 0; r < sessions.size(); ++r) {
    makers.emplace_back([topology, session = sessions[r], mesh = meshes[r]] {
      session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
      return std::make_shared<HierarchicalGroup>(topology, session, mesh);
    });
  }
  check_late_writer(makers, sessions, 2);
}

// Only some tensors are in the heap, so all ranks' data goes through other memory.
TEST(tensors_that_no_peer_writes_to_stay_shared_when_a_reduction_fails) {
  const Sessions sessions = testing::make_sessions(testing::topology_of(2, [](int) { return 0; }), 0);
  std::vector<float> ordinary(kCount);
  auto* const page = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(ordinary.data()) + 4095) / 4096 * 4096);
  std::atomic<bool> held{false};
  std::vector<std::shared_ptr<Group>> groups(2);
  std::atomic<int> joined{0};
  run_ranks(3, [&](int rank) {
    if (rank == 2) {
      while (joined != 2) std::this_thread::yield();
      HeldWrite write(page, kCount * sizeof(float) / 4096 * 4096 - 4096);
      held = true;
      while (!write.reached()) std::this_thread::yield();
      groups[0]->abort("enough");
      return write.go_on();
    }
    const auto& session = sessions[static_cast<size_t>(rank)];
    session->wait_attached(Deadline::after(std::chrono::seconds(30)), [] {});
    auto& group = groups[static_cast<size_t>(rank)];
    group = std::make_shared<NodeGroup>(session);
    const auto memory = group->allocate(kCount * sizeof(float));
    auto* const data = rank == 0 ? static_cast<float*>(memory.get()) : ordinary.data();
    std::fill_n(data, kCount, 1.0F);
    ++joined;
    while (!held) std::this_thread::yield();
    CHECK_THROWS(AbortedError, group->all_reduce(call_of(Op::AllReduce, DType::Float32, 0),
                                                 std::vector<Span>{{data, kCount * sizeof(float)}},
                                                 Reduction{ReduceKind::Sum, 2, 1.0}));
    if (rank == 1) return;
    const uint64_t offset = session->heap()->offset_of(data, kCount * sizeof(float));
    reinterpret_cast<std::atomic<float>*>(sessions[1]->heap()->at(0, offset))->store(5);
    CHECK_EQ(data[0], 5.0F);
  });
}

}  // namespace
}  // namespace ours
