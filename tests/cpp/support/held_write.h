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
    place_ = places().begin();
    for (HeldWrite* none = nullptr; !place_->held.compare_exchange_strong(none, this); none = nullptr) {
      CHECK(++place_ != places().end());
    }
    CHECK_EQ(::mprotect(data_, bytes_, PROT_READ), 0);
  }
  HeldWrite(const HeldWrite&) = delete;
  HeldWrite& operator=(const HeldWrite&) = delete;
  ~HeldWrite() {
    go_on();
    ::mprotect(data_, bytes_, PROT_READ | PROT_WRITE);
    place_->held = nullptr;
    while (place_->looking != 0) ::sched_yield();  // a thread whose write is held has yet to see that it may go on
  }

  /// Whether a write is, or was, held.
  bool reached() const { return reached_; }
  void go_on() { may_go_on_ = true; }

 private:
  struct Place {
    std::atomic<HeldWrite*> held;
    std::atomic<int> looking;  ///< threads that may refer to it
  };
  using Places = std::array<Place, 8>;
  static Places& places() {
    static Places all{};
    return all;
  }

  static void on_fault(int, siginfo_t* info, void*) {
    const auto* const at = static_cast<const std::byte*>(info->si_addr);
    for (Place& place : places()) {
      ++place.looking;
      HeldWrite* const held = place.held;
      const bool here = held != nullptr && at >= held->data_ && at < held->data_ + held->bytes_;
      if (here) {
        held->reached_ = true;
        while (!held->may_go_on_) ::sched_yield();
        ::mprotect(held->data_, held->bytes_, PROT_READ | PROT_WRITE);
      }
      --place.looking;
      if (here) return;
    }
    ::signal(SIGSEGV, SIG_DFL);  // an ordinary crash
  }

  Places::iterator place_{};
  std::byte* const data_;
  const size_t bytes_;
  std::atomic<bool> reached_{false};
  std::atomic<bool> may_go_on_{false};
};

}  // namespace ours::testing
