#include "common/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "support/testing.h"

namespace ours::testing {
namespace {

constexpr size_t kBytes = size_t{8} << 20;
constexpr size_t kOdd = 12345;  // the buffer begins inside a page

/// Memory of its own, no part of which is on huge pages yet, unless the system gives them to everybody.
class Buffer {
 public:
  Buffer() : map_(::mmap(nullptr, 2 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    CHECK(map_ != MAP_FAILED);
    for (size_t i = 0; i < kBytes; ++i) data()[i] = byte(i);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { ::munmap(map_, 2 * kBytes); }

  uint8_t* data() { return static_cast<uint8_t*>(map_) + kOdd; }
  bool unchanged() {
    for (size_t i = 0; i < kBytes; ++i) {
      if (data()[i] != byte(i)) return false;
    }
    return true;
  }

  /// Bytes of the map that are on huge pages.
  size_t huge() const {
    std::ifstream maps("/proc/self/smaps");
    const auto begin = reinterpret_cast<uintptr_t>(map_);
    bool inside = false;
    size_t total = 0;
    for (std::string line; std::getline(maps, line);) {
      unsigned long from = 0, to = 0, size = 0;
      if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) inside = from >= begin && to <= begin + 2 * kBytes;
      if (inside && std::sscanf(line.c_str(), "AnonHugePages: %lu kB", &size) == 1) total += size * 1024;
    }
    return total;
  }

 private:
  static uint8_t byte(size_t i) { return static_cast<uint8_t>(i * 7 + i / 4096); }
  void* map_;
};

/// Whether this system moves pages when asked, and only then.
bool system_can() {
  Buffer buffer;
  if (buffer.huge() > 0) return false;
  HugePages pages(true);
  for (int i = 0; i < 3; ++i) pages.note_use(buffer.data(), kBytes);
  return buffer.huge() > 0;
}

TEST(huge_pages_come_with_the_third_use_and_change_nothing_else) {
  const bool can = system_can();
  Buffer buffer;
  HugePages pages(true);
  for (int time = 1; time <= 4; ++time) {
    pages.note_use(buffer.data(), kBytes);
    // Of 8 MiB that begin within a page, three huge pages are whole.
    if (can) CHECK_EQ(buffer.huge(), time < 3 ? size_t{0} : size_t{6} << 20);
    CHECK(buffer.unchanged());
  }
}

TEST(huge_pages_are_left_to_those_who_want_them) {
  const bool can = system_can();
  Buffer buffer;
  HugePages off(false);
  HugePages pages(true);
  for (int i = 0; i < 5; ++i) {
    off.note_use(buffer.data(), kBytes);
    pages.note_use(buffer.data(), HugePages::kLeastBytes - 1);
    pages.note_use(buffer.data(), kBytes - static_cast<size_t>(i));  // another buffer each time
    pages.note_use(nullptr, 0);
  }
  if (can) CHECK_EQ(buffer.huge(), size_t{0});
}

TEST(huge_pages_of_memory_that_is_gone_are_no_error) {
  HugePages pages(true);
  uint8_t* gone = nullptr;
  {
    Buffer buffer;
    gone = buffer.data();
    pages.note_use(gone, kBytes);
    pages.note_use(gone, kBytes);
  }
  pages.note_use(gone, kBytes);
}

}  // namespace
}  // namespace ours::testing
