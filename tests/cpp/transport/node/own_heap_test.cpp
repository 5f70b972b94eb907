#include "transport/node/own_heap.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/error.h"
#include "common/huge_pages.h"
#include "support/children.h"
#include "support/ranks.h"
#include "transport/node/process_heaps.h"

namespace ours::testing {
namespace {

constexpr size_t kPage = 4096;

/// The bytes of memory that the heap takes.
size_t bytes_of(const OwnHeap& heap) {
  struct stat info{};
  CHECK_EQ(::fstat(heap.place().fd, &info), 0);
  return static_cast<size_t>(info.st_blocks) * 512;
}

TEST(heap_gives_pages_of_zeros_and_takes_them_back) {
  OwnHeap heap;
  std::byte* const a = heap.allocate(1);
  std::byte* const b = heap.allocate(3 * kPage);
  std::byte* const c = heap.allocate(kPage + 1);
  CHECK_EQ(bytes_of(heap), 6 * kPage);
  for (std::byte* data : {a, b, c}) CHECK_EQ(reinterpret_cast<uintptr_t>(data) % kPage, uintptr_t{0});
  std::memset(b, 1, 3 * kPage);
  heap.free(b);
  CHECK_EQ(bytes_of(heap), 3 * kPage);
  // The gap is used again, and has been zeroed again.
  std::byte* const d = heap.allocate(2 * kPage);
  CHECK(d == b);
  for (size_t i = 0; i < 2 * kPage; ++i) CHECK(d[i] == std::byte{0});
  std::byte* const e = heap.allocate(kPage);
  CHECK(e == b + 2 * kPage);
  for (std::byte* data : {a, c, d, e}) heap.free(data);
  CHECK_EQ(bytes_of(heap), size_t{0});
  CHECK(heap.allocate(10 * kPage) == a);
}

TEST(heap_knows_what_is_its_own) {
  OwnHeap heap;
  int elsewhere = 0;
  CHECK_EQ(heap.offset_of(&elsewhere, 4), OwnHeap::kNowhere);
  std::byte* const a = heap.allocate(2 * kPage);
  std::byte* const b = heap.allocate(kPage);
  CHECK_EQ(heap.offset_of(a, 2 * kPage), uint64_t{0});
  CHECK_EQ(heap.offset_of(a + 100, 5), uint64_t{100});
  CHECK_EQ(heap.offset_of(b, kPage), uint64_t{2 * kPage});
  CHECK(heap.at(100) == a + 100);
  // Two pieces side by side are not one piece, and freed memory belongs to none.
  CHECK_EQ(heap.offset_of(a, 3 * kPage), OwnHeap::kNowhere);
  heap.free(a);
  CHECK_EQ(heap.offset_of(a, 1), OwnHeap::kNowhere);
  CHECK_EQ(heap.offset_of(b, 1), uint64_t{2 * kPage});
}

TEST(heap_pieces_have_one_user_at_a_time) {
  OwnHeap heap;
  std::byte* const a = heap.allocate(2 * kPage);
  std::byte* const b = heap.allocate(kPage);
  const int one = 1, other = 2;
  CHECK_EQ(heap.claim(a, kPage, &one), uint64_t{0});
  CHECK_EQ(heap.claim(a + kPage, kPage, &one), uint64_t{kPage});
  CHECK_EQ(heap.claim(a + kPage, kPage, &other), OwnHeap::kNowhere);
  CHECK_EQ(heap.claim(b, kPage, &other), uint64_t{2 * kPage});
  heap.release(kPage, &one);
  CHECK_EQ(heap.claim(a, 2 * kPage, &other), uint64_t{0});
  heap.release(0, &one);  // of a piece that has the next user already
  CHECK_EQ(heap.claim(a, kPage, &one), OwnHeap::kNowhere);
  heap.free(b);
  heap.release(2 * kPage, &other);
  CHECK_EQ(heap.claim(a, kPage, &one), OwnHeap::kNowhere);
}

TEST(heap_refuses_what_it_does_not_have) {
  OwnHeap heap;
  CHECK_THROWS(SystemError, heap.allocate(HeapFile::kBytes + 1));
  CHECK_EQ(bytes_of(heap), size_t{0});
  heap.free(heap.allocate(1));
  heap.free(nullptr);
}

/// How many of the bytes mapped at `data` are of that kind; the kinds are named as in /proc/<pid>/smaps.
size_t mapped_bytes(const void* data, const std::string& kind) {
  std::ifstream maps("/proc/self/smaps");
  const auto address = reinterpret_cast<uintptr_t>(data);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long from = 0, to = 0, size = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) inside = from <= address && address < to;
    if (inside && std::sscanf(line.c_str(), (kind + ": %lu kB").c_str(), &size) == 1) return size * 1024;
  }
  return 0;
}

size_t huge_bytes(const void* data) { return mapped_bytes(data, "ShmemPmdMapped"); }

TEST(heap_moves_what_fills_huge_pages_onto_them) {
  constexpr size_t kPiece = kHugePage / 4;
  OwnHeap probe(true);
  std::byte* const first = probe.allocate(kHugePage);
  first[0] = std::byte{1};
  const bool can = huge_bytes(first) == kHugePage;

  OwnHeap heap(true);
  std::vector<std::byte*> pieces;
  const auto add = [&](size_t bytes) {
    pieces.push_back(heap.allocate(bytes));
    std::memset(pieces.back(), static_cast<int>(pieces.size()), bytes);
    for (size_t i = 0; i < pieces.size(); ++i) CHECK(pieces[i][kPage] == static_cast<std::byte>(i + 1));
    return can ? huge_bytes(pieces[0]) / kHugePage : 0;
  };
  const auto pages = [can](size_t number) { return can ? number : 0; };
  CHECK_EQ(add(kPiece), pages(0));
  CHECK_EQ(add(2 * kPiece), pages(0));
  CHECK_EQ(add(kPiece), pages(1));
  CHECK_EQ(add(kHugePage + kPiece), pages(2));
  // A huge page with a gap is not moved, and is left as it is when the gap is filled again.
  heap.free(pieces[2]);
  CHECK(pieces[3][0] == std::byte{4});
  pieces.erase(pieces.begin() + 2);
  std::memset(pieces[2], 3, kHugePage + kPiece);
  CHECK_EQ(add(kPiece / 2), pages(1));
  CHECK_EQ(add(kPiece / 2), pages(1));

  OwnHeap plain;
  std::byte* const ordinary = plain.allocate(2 * kHugePage);
  std::memset(ordinary, 1, 2 * kHugePage);
  CHECK_EQ(huge_bytes(ordinary), size_t{0});
}

/// A heap, and what a peer sees of it.
struct TwoRanks {
  OwnHeap heap{true};
  PeerHeap peer{heap.place()};
};

TEST(heap_keeps_what_was_withdrawn_from_peers_and_gives_it_back) {
  constexpr size_t kBytes = 2 * kHugePage + 5 * kPage;
  TwoRanks two;
  std::byte* const before = two.heap.allocate(kPage);
  std::byte* const data = two.heap.allocate(kBytes);
  const uint64_t offset = two.heap.offset_of(data, kBytes);
  std::byte* const seen = two.peer.at(offset);
  for (size_t i = 0; i < kBytes; ++i) data[i] = static_cast<std::byte>(i % 251);
  std::memset(before, 9, kPage);
  // Ranges that share pages, in any order, but not the last page.
  two.heap.withdraw(offset + 5 * kPage + 100, kBytes - 7 * kPage);
  two.heap.withdraw(offset + 10, 3 * kPage);
  two.heap.withdraw(offset + kPage, 7 * kPage);
  CHECK_EQ(two.heap.offset_of(data + kBytes - kPage, kPage), OwnHeap::kNowhere);
  CHECK_EQ(two.heap.offset_of(before, kPage), uint64_t{0});
  std::memset(seen, 255, kBytes);
  std::memset(two.peer.at(0), 8, kPage);
  for (size_t i = 0; i < kBytes - kPage; ++i) CHECK_EQ(data[i], static_cast<std::byte>(i % 251));
  for (size_t i = kBytes - kPage; i < kBytes; ++i) CHECK_EQ(data[i], std::byte{255});
  for (size_t i = 0; i < kPage; ++i) CHECK_EQ(before[i], std::byte{8});

  // A child sees the contents, and has its own copy.
  CHECK(in_child([&] {
    const bool same = data[kPage] == static_cast<std::byte>(kPage % 251) && before[0] == std::byte{8};
    std::memset(data, 1, kBytes);
    std::memset(before, 1, kPage);
    return same;
  }));
  CHECK_EQ(data[kPage], static_cast<std::byte>(kPage % 251));
  CHECK_EQ(before[0], std::byte{8});

  two.heap.free(data);
  CHECK_EQ(mapped_bytes(data, "Anonymous"), size_t{0});
  CHECK_EQ(bytes_of(two.heap), kPage);
  // The range is not given out again.
  CHECK(two.heap.allocate(kPage) >= data + kBytes);
}

TEST(heap_withdraws_without_a_second_copy_and_without_a_moment_in_which_writes_are_lost) {
  constexpr size_t kBytes = 4 * kHugePage;
  TwoRanks two;
  auto* const words = reinterpret_cast<std::atomic<uint64_t>*>(two.heap.allocate(kBytes));
  constexpr size_t kWords = kBytes / sizeof(uint64_t);
  for (size_t i = 0; i < kWords; ++i) words[i].store(i, std::memory_order_relaxed);
  std::atomic<bool> stop{false};
  uint64_t rounds = 0;
  std::atomic<uint64_t> begun{0};
  std::thread writer([&] {
    do {
      begun = ++rounds;
      for (size_t i = 0; i < kWords; i += 64) {
        words[i].store(words[i].load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
      }
    } while (!stop);
  });
  wait_until([&] { return begun != 0; });
  two.heap.withdraw(0, kBytes);
  stop = true;
  writer.join();
  for (size_t i = 0; i < kWords; ++i) CHECK_EQ(words[i].load(), i % 64 == 0 ? i + rounds : i);
  CHECK_EQ(bytes_of(two.heap), size_t{0});
}

}  // namespace
}  // namespace ours::testing
