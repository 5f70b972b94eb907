#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

#include "common/deadline.h"
#include "common/futex.h"

namespace ours {

/// A counter that others can sleep on. `sleepers` lets the writer skip the system call when no thread sleeps.
struct SleepWord {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> sleepers;
};

/// How a rank waits for another. It stays awake for a while, since a running peer answers within microseconds and
/// waking a sleeper takes ten times as long. After `spin` it keeps yielding its core, and it sleeps as soon as a yield
/// shows that another thread needs the core.
struct WaitPolicy {
  std::chrono::microseconds awake{500};  ///< in this rank's own time, without that of others on a yielded core
  std::chrono::microseconds spin{0};     ///< first part of `awake`, in which the core is kept instead of yielded
};

/// A waiting rank looks around (dead peers, abort, deadline) this often.
constexpr std::chrono::milliseconds kLookAround{50};

/// A yield that takes longer than this has let another thread run.
constexpr std::chrono::microseconds kOwnTurn{2};

/// A yield that takes longer than this has let a thread compute that is not about to answer.
constexpr std::chrono::microseconds kForeignWork{1000};

inline void relax_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Gives `word` a new value and wakes its sleepers. All four operations, here and in sleep_on(), are sequentially
/// consistent: either this sees the sleeper or the sleeper sees the value, so no wake-up is lost.
inline void signal(SleepWord& word, uint32_t value) {
  word.value.store(value, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(word.value);
}

/// Adds one to `word`, which others may do at the same time, and wakes its sleepers.
inline void signal(SleepWord& word) {
  word.value.fetch_add(1, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(word.value);
}

/// The time that a waiter spends awake.
class Awake {
 public:
  explicit Awake(const WaitPolicy& policy) : policy_(policy) {}

  /// Lets a moment pass, less if ready() holds before. Returns false once it is time to sleep.
  template <class Ready>
  bool moment(Ready&& ready) {
    if (used_ >= policy_.awake) return false;
    if (last_ - start_ < policy_.spin) {
      for (int i = 0; i < 32 && !ready(); ++i) relax_cpu();
    } else {
      ::sched_yield();
    }
    const auto now = Clock::now();
    const auto took = now - last_;
    used_ += std::min<Clock::duration>(took, kOwnTurn);
    last_ = now;
    return took <= kForeignWork && now - start_ < kLookAround;
  }

 private:
  const WaitPolicy policy_;
  const Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
  Clock::duration used_{0};
};

/// Sleeps until `word` changes, at most for `limit`, and not at all if ready() holds.
template <class Ready>
void sleep_on(SleepWord& word, std::chrono::nanoseconds limit, Ready&& ready) {
  word.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = word.value.load(std::memory_order_seq_cst);
  if (!ready() && limit.count() > 0) futex_wait(word.value, seen, limit);
  word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

/// Returns once ready() holds; it may become true only through a change of `word`. Calls look_around() after every
/// sleep, which may throw to end the wait, and must once the deadline has passed.
template <class Ready, class LookAround>
void wait_on(SleepWord& word, const WaitPolicy& policy, Deadline deadline, Ready&& ready, LookAround&& look_around) {
  if (ready()) return;
  for (Awake awake(policy); awake.moment(ready);) {
    if (ready()) return;
  }

  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::nanoseconds>(deadline.at() - Clock::now());
    sleep_on(word, std::min<std::chrono::nanoseconds>(left, kLookAround), ready);
    if (ready()) return;
    look_around();
  }
}

}  // namespace ours
