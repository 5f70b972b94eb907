#pragma once

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>

#include "support/testing.h"

namespace ours::testing {

/// Counts the pages that are read or written through some mappings, in the caller's counters.
class TouchedPages {
 public:
  TouchedPages() {
    here() = this;
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    CHECK_EQ(::sigaction(SIGSEGV, &action, &before_), 0);
  }
  TouchedPages(const TouchedPages&) = delete;
  TouchedPages& operator=(const TouchedPages&) = delete;
  ~TouchedPages() {
    for (size_t i = 0; i < count_; ++i) ::mprotect(ranges_[i].data, ranges_[i].bytes, PROT_READ | PROT_WRITE);
    ::sigaction(SIGSEGV, &before_, nullptr);
    here() = nullptr;
  }

  /// Counts the whole pages in [data, data + bytes) from now on, each once. `counter` must outlive this object.
  void count(std::byte* data, size_t bytes, std::atomic<size_t>& counter) {
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
    const uintptr_t end = reinterpret_cast<uintptr_t>(data + bytes) / kPage * kPage;
    CHECK(begin < end && count_ < ranges_.size());
    std::byte* const first = data + (begin - reinterpret_cast<uintptr_t>(data));
    ranges_[count_++] = {first, end - begin, &counter};
    CHECK_EQ(::mprotect(first, end - begin, PROT_NONE), 0);
  }

  static constexpr size_t kPage = 4096;

 private:
  struct Range {
    std::byte* data;
    size_t bytes;
    std::atomic<size_t>* counter;
  };

  static std::atomic<TouchedPages*>& here() {
    static std::atomic<TouchedPages*> one{nullptr};
    return one;
  }

  static void on_fault(int, siginfo_t* info, void*) {
    auto* const at = static_cast<std::byte*>(info->si_addr);
    const TouchedPages& self = *here();
    for (size_t i = 0; i < self.count_; ++i) {
      const Range& range = self.ranges_[i];
      if (at < range.data || at >= range.data + range.bytes) continue;
      std::byte* const page = range.data + static_cast<size_t>(at - range.data) / kPage * kPage;
      if (::mprotect(page, kPage, PROT_READ | PROT_WRITE) != 0) break;
      ++*range.counter;
      return;
    }
    ::signal(SIGSEGV, SIG_DFL);  // an ordinary crash
  }

  std::array<Range, 256> ranges_{};
  size_t count_ = 0;
  struct sigaction before_{};
};

}  // namespace ours::testing
