#pragma once

#include <sched.h>
#include <sys/mman.h>

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>

#include "support/testing.h"

namespace ours::testing {

/// Holds the first write to [data, data + bytes), whole pages, until go_on(), like a process that is stopped in the
/// middle of its work. Writes to the same memory by other addresses pass.
class HeldWrite {
 public:
  HeldWrite(std::byte* data, size_t bytes) : data_(data), bytes_(bytes) {
    static const bool kInstalled = [] {
      struct sigaction action{};
      action.sa_sigaction = on_fault;
      action.sa_flags = SA_SIGINFO | SA_NODEFER;
      return ::sigaction(SIGSEGV, &action, nullptr) == 0;
    }();
    CHECK(kInstalled);
    auto place = places().begin();
    for (HeldWrite* none = nullptr; !place->compare_exchange_strong(none, this); none = nullptr) {
      CHECK(++place != places().end());
    }
    CHECK_EQ(::mprotect(data_, bytes_, PROT_READ), 0);
  }
  HeldWrite(const HeldWrite&) = delete;
  HeldWrite& operator=(const HeldWrite&) = delete;
  ~HeldWrite() {
    go_on();
    ::mprotect(data_, bytes_, PROT_READ | PROT_WRITE);
    for (auto& place : places()) {
      HeldWrite* self = this;
      place.compare_exchange_strong(self, nullptr);
    }
  }

  /// Whether a write is, or was, held.
  bool reached() const { return reached_; }
  void go_on() { may_go_on_ = true; }

 private:
  using Places = std::array<std::atomic<HeldWrite*>, 8>;
  static Places& places() {
    static Places all{};
    return all;
  }

  static void on_fault(int, siginfo_t* info, void*) {
    const auto* const at = static_cast<const std::byte*>(info->si_addr);
    for (const auto& place : places()) {
      HeldWrite* const held = place;
      if (held == nullptr || at < held->data_ || at >= held->data_ + held->bytes_) continue;
      held->reached_ = true;
      while (!held->may_go_on_) ::sched_yield();
      ::mprotect(held->data_, held->bytes_, PROT_READ | PROT_WRITE);
      return;
    }
    ::signal(SIGSEGV, SIG_DFL);  // an ordinary crash
  }

  std::byte* const data_;
  const size_t bytes_;
  std::atomic<bool> reached_{false};
  std::atomic<bool> may_go_on_{false};
};

}  // namespace ours::testing
