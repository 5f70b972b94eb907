#include "transport/node/node_heap.h"

#include <dirent.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "common/error.h"
#include "support/children.h"
#include "support/held_write.h"
#include "support/node_ranks.h"

namespace ours::testing {
namespace {

constexpr size_t kPage = 4096;

TEST(heap_of_a_peer_is_seen_where_it_says) {
  run_sessions(3, 4096, [](std::shared_ptr<NodeSession> session) {
    NodeGroup group(session);
    NodeHeap& heap = session->heap();
    const std::shared_ptr<void> memory = heap.allocate(kPage);
    auto* const mine = static_cast<std::byte*>(memory.get());
    mine[5] = static_cast<std::byte>(session->rank() + 1);
    session->self().parts[0] = heap.offset_of(mine + 5, 1);
    barrier(group, 0);
    for (int r = 0; r < 3; ++r) {
      CHECK(*heap.at(r, session->block(r).parts[0]) == static_cast<std::byte>(r + 1));
    }
    barrier(group, 1);
  });
}

/// How many descriptors this process has open.
size_t descriptors() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  size_t count = 0;
  while (::readdir(folder.get()) != nullptr) ++count;
  return count;
}

std::shared_ptr<NodeSession> session_of_one(const std::shared_ptr<ProcessHeaps>& heaps) {
  return make_sessions({heaps}, 4096)[0];
}

TEST(groups_take_no_descriptors_and_share_the_heaps_of_their_processes) {
  constexpr int kRanks = 3;
  std::vector<std::shared_ptr<ProcessHeaps>> heaps;
  for (int r = 0; r < kRanks; ++r) heaps.push_back(std::make_shared<ProcessHeaps>());
  std::vector<Sessions> groups;
  std::vector<std::shared_ptr<void>> memory;
  size_t before = 0;
  for (int i = 0; i < 10; ++i) {
    groups.push_back(make_sessions(heaps, 4096));
    // Ranks of all groups reduce what the first one has allocated.
    for (int r = 0; i == 0 && r < kRanks; ++r) {
      memory.push_back(groups[0][static_cast<size_t>(r)]->heap().allocate(4 * kPage));
    }
    run_ranks(kRanks, [&](int rank) {
      const auto& session = groups.back()[static_cast<size_t>(rank)];
      NodeGroup group(session);
      auto* const data = static_cast<float*>(memory[static_cast<size_t>(rank)].get());
      std::iota(data, data + 4 * kPage / sizeof(float), static_cast<float>(rank));
      CHECK(session->heap().offset_of(data, 4 * kPage) != NodeHeap::kNowhere);
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0), std::vector<Span>{{data, 4 * kPage}},
                       Reduction{ReduceKind::Sum, kRanks, 1.0});
      for (size_t k = 0; k < kPage; ++k) CHECK_EQ(data[k], static_cast<float>(3 * k + 3));
      CHECK_EQ(session->heap().bytes_in_use(), i == 0 ? 4 * kPage : 0);
    });
    if (i == 0) before = descriptors();
  }
  CHECK_EQ(descriptors(), before);
}

TEST(a_group_that_fails_takes_its_tensors_out_of_every_groups_heap) {
  const auto heaps = std::make_shared<ProcessHeaps>();
  const auto failed = session_of_one(heaps), other = session_of_one(heaps);
  const auto withdrawn = failed->heap().allocate(kPage), kept = failed->heap().allocate(kPage);
  const uint64_t offset = failed->heap().offset_of(withdrawn.get(), kPage);
  CHECK_EQ(other->heap().offset_of(withdrawn.get(), kPage), offset);
  failed->heap().withdraw(offset, kPage);
  CHECK_EQ(other->heap().offset_of(withdrawn.get(), kPage), NodeHeap::kNowhere);
  CHECK(other->heap().offset_of(kept.get(), kPage) != NodeHeap::kNowhere);
  // A new group has a new heap: a late peer may still write to the old one.
  const auto next = session_of_one(heaps);
  CHECK_EQ(next->heap().offset_of(kept.get(), kPage), NodeHeap::kNowhere);
  const auto fresh = next->heap().allocate(kPage);
  CHECK_EQ(next->heap().offset_of(fresh.get(), kPage), uint64_t{0});
  CHECK_EQ(other->heap().offset_of(fresh.get(), kPage), NodeHeap::kNowhere);
}

TEST(a_reduction_fails_if_another_group_withdraws_memory_meanwhile) {
  constexpr size_t kBytes = size_t{1} << 20;
  std::vector<std::shared_ptr<ProcessHeaps>> heaps{std::make_shared<ProcessHeaps>(), std::make_shared<ProcessHeaps>()};
  const Sessions sessions = make_sessions(heaps, 0);
  const auto failed = session_of_one(heaps[0]);
  const auto withdrawn = failed->heap().allocate(kPage);
  std::vector<std::shared_ptr<void>> memory;
  for (const auto& session : sessions) memory.push_back(session->heap().allocate(kBytes));
  const auto first_write = [&](size_t of, size_t to) {
    const uint64_t offset = sessions[to]->heap().offset_of(memory[to].get(), kBytes);
    return std::make_unique<HeldWrite>(sessions[of]->heap().at(static_cast<int>(to), offset), kBytes);
  };
  // Rank 0 leaves some work for rank 1, which is in the middle of it.
  const auto other = first_write(0, 1), late = first_write(1, 0);
  run_ranks(3, [&](int rank) {
    if (rank == 2) {
      wait_until([&] { return late->reached(); });
      failed->heap().withdraw(failed->heap().offset_of(withdrawn.get(), kPage), kPage);
      late->go_on();
      return other->go_on();
    }
    NodeGroup group(sessions[static_cast<size_t>(rank)]);
    const auto reduce = [&] {
      group.all_reduce(call_of(Op::AllReduce, DType::Float32, 0),
                       std::vector<Span>{{memory[static_cast<size_t>(rank)].get(), kBytes}},
                       Reduction{ReduceKind::Sum, 2, 1.0});
    };
    if (rank == 0) {
      CHECK_CONTAINS(CHECK_THROWS(Error, reduce()), "another group failed meanwhile");
      return;
    }
    try {
      reduce();
    } catch (const Error&) {
      // It may have been told before the operation ended.
    }
  });
}

TEST(a_heap_of_more_ranks_than_there_are_addresses_for_is_refused_before_anything_is_reduced) {
  constexpr size_t kRanks = (size_t{1} << 57) / HeapFile::kBytes;
  const auto heaps = std::make_shared<ProcessHeaps>();
  HeapPlace place{};
  NodeHeap heap(1, std::vector<HeapPlace*>(kRanks, &place), heaps), alone(0, {&place}, heaps);
  CHECK_CONTAINS(CHECK_THROWS(SystemError, heap.allocate(1)), "ulimit -v");
  const auto memory = alone.allocate(1);
  CHECK_EQ(heap.offset_of(memory.get(), 1), NodeHeap::kNowhere);
  CHECK_EQ(alone.offset_of(memory.get(), 1), uint64_t{0});
}

TEST(what_is_no_heap_is_not_mapped) {
  const OwnHeap heap;
  HeapPlace place = heap.place();
  ++place.inode;
  CHECK_CONTAINS(CHECK_THROWS(Error, HeapFile::open(place)), "has no heap where it said");
  place.fd = 999999;
  CHECK_THROWS(SystemError, HeapFile::open(place));
}

TEST(heap_outlives_the_group_and_is_left_alone_by_forked_children) {
  std::shared_ptr<void> memory;
  {
    memory = session_of_one(ProcessHeaps::here())->heap().allocate(100);
  }
  std::memset(memory.get(), 7, 100);
  CHECK(in_child([&] {
    const bool same = static_cast<char*>(memory.get())[99] == 7;
    std::memset(memory.get(), 8, 100);
    memory.reset();
    return same;
  }));
  for (size_t i = 0; i < 100; ++i) CHECK(static_cast<char*>(memory.get())[i] == 7);
}

TEST(all_reduce_in_the_heap_of_more_pieces_than_can_be_published_is_done_by_copying) {
  run_sessions(2, 4096, [&](std::shared_ptr<NodeSession> session) {
    NodeGroup group(session);
    const size_t count = 4096 / sizeof(BufferPart) + 1;
    const std::shared_ptr<void> memory = group.allocate(2 * 4096);
    auto* const data = static_cast<double*>(memory.get());
    std::fill_n(data, 2 * count, 1.0);
    std::vector<Span> pieces;
    for (size_t i = 0; i < count; ++i) pieces.push_back({data + 2 * i, 2 * sizeof(double)});
    group.all_reduce(call_of(Op::AllReduce, DType::Float64, 0), pieces, Reduction{ReduceKind::Sum, 2, 1.0});
    for (size_t i = 0; i < 2 * count; ++i) CHECK_EQ(data[i], 2.0);
  });
}

TEST(a_group_that_has_failed_gives_out_no_memory_that_peers_may_still_write_to) {
  NodeGroup group(NodeSession::create(0, 1, NodeConfig{4096, 4096}));
  CHECK(group.allocate(100) != nullptr);
  group.abort("enough");
  CHECK(group.allocate(100) == nullptr);
}

}  // namespace
}  // namespace ours::testing
