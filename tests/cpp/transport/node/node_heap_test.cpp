#include "transport/node/node_heap.h"

#include <dirent.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "common/error.h"
#include "support/children.h"
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
      for (uint64_t seq = 0; seq < 2; ++seq) {  // the first time they may not have seen one another's heaps
        std::iota(data, data + 4 * kPage / sizeof(float), static_cast<float>(rank));
        group.all_reduce(call_of(Op::AllReduce, DType::Float32, seq), std::vector<Span>{{data, 4 * kPage}},
                         Reduction{ReduceKind::Sum, kRanks, 1.0});
        for (size_t k = 0; k < kPage; ++k) CHECK_EQ(data[k], static_cast<float>(3 * k + 3));
      }
      CHECK(session->heap().claim(data, 4 * kPage) != NodeHeap::kNowhere);
      session->heap().release();
      CHECK_EQ(session->heap().bytes_in_use(), i == 0 ? 4 * kPage : 0);
    });
    if (i == 0) before = descriptors();
  }
  CHECK_EQ(descriptors(), before);
}

TEST(a_group_that_fails_takes_its_tensors_out_of_every_groups_heap) {
  const auto heaps = std::make_shared<ProcessHeaps>();
  const auto failed = session_of_one(heaps), other = session_of_one(heaps);
  const auto withdrawn = failed->heap().allocate(2 * kPage), kept = failed->heap().allocate(kPage);
  const uint64_t offset = failed->heap().claim(withdrawn.get(), kPage);
  // What one group uses the other has to copy.
  CHECK_EQ(other->heap().claim(withdrawn.get(), 2 * kPage), NodeHeap::kNowhere);
  CHECK_EQ(other->heap().offset_of(withdrawn.get(), kPage), offset);
  CHECK(other->heap().claim(kept.get(), kPage) != NodeHeap::kNowhere);
  failed->heap().withdraw(offset, kPage);
  failed->heap().release();
  CHECK_EQ(other->heap().claim(withdrawn.get(), 2 * kPage), NodeHeap::kNowhere);
  CHECK_EQ(session_of_one(heaps)->heap().claim(withdrawn.get(), kPage), NodeHeap::kNowhere);
  // The rest of the heap goes on.
  const auto next = session_of_one(heaps);
  const auto fresh = next->heap().allocate(kPage);
  CHECK(next->heap().claim(fresh.get(), kPage) != NodeHeap::kNowhere);
}

TEST(a_heap_that_has_lost_too_many_addresses_serves_only_the_groups_that_have_it) {
  const auto heaps = std::make_shared<ProcessHeaps>(2 * kPage);
  const auto first = session_of_one(heaps);
  std::vector<std::shared_ptr<void>> memory;
  for (int i = 0; i < 3; ++i) {
    memory.push_back(first->heap().allocate(kPage));
    CHECK(heaps->make_own() == heaps->own());
    const uint64_t offset = first->heap().offset_of(memory.back().get(), kPage);
    for (int again = 0; again < 2; ++again) first->heap().withdraw(offset, kPage);
    CHECK_EQ(heaps->own()->lost(), static_cast<size_t>(i + 1) * kPage);
  }
  const auto kept = first->heap().allocate(kPage);
  const auto second = session_of_one(heaps);
  const auto fresh = second->heap().allocate(kPage);
  CHECK_EQ(heaps->own()->lost(), size_t{0});
  CHECK_EQ(first->heap().claim(fresh.get(), kPage), NodeHeap::kNowhere);
  CHECK(first->heap().claim(kept.get(), kPage) != NodeHeap::kNowhere);
  CHECK_EQ(second->heap().claim(kept.get(), kPage), NodeHeap::kNowhere);
  CHECK(second->heap().claim(fresh.get(), kPage) != NodeHeap::kNowhere);
}

TEST(tensors_are_copied_as_long_as_a_rank_does_not_see_the_heaps_of_all) {
  ShownHeap shown[2] = {};
  const auto heaps = std::make_shared<ProcessHeaps>(), others = std::make_shared<ProcessHeaps>();
  NodeHeap first(0, {&shown[0], &shown[1]}, heaps), second(1, {&shown[0], &shown[1]}, others);
  const auto memory = first.allocate(kPage);
  CHECK_EQ(first.claim(memory.get(), kPage), NodeHeap::kNowhere);
  const auto theirs = second.allocate(kPage);
  CHECK_EQ(first.claim(memory.get(), kPage), uint64_t{0});
  CHECK_EQ(second.claim(theirs.get(), kPage), uint64_t{0});
  static_cast<std::byte*>(theirs.get())[7] = std::byte{7};
  CHECK(first.at(1, 7)[0] == std::byte{7});
  // A peer's heap that cannot be mapped is looked for once.
  shown[1].place.fd = 999999;
  NodeHeap blind(0, {&shown[0], &shown[1]}, std::make_shared<ProcessHeaps>());
  const auto own = blind.allocate(kPage);
  CHECK_EQ(blind.claim(own.get(), kPage), NodeHeap::kNowhere);
  shown[1].place = {};
  CHECK_EQ(blind.claim(own.get(), kPage), NodeHeap::kNowhere);
}

TEST(a_process_that_can_have_no_heap_says_so) {
  CHECK(in_child([] {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{1 << 20, 1 << 20};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    ShownHeap shown{};
    NodeHeap heap(0, {&shown}, std::make_shared<ProcessHeaps>());
    return !heap.allocates() && heap.allocate(1) == nullptr;
  }));
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

}  // namespace
}  // namespace ours::testing
