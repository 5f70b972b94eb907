#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "common/deadline.h"

namespace ours {

/// How long a transfer may take, counted from the moment when it is first waited for: a receive that was posted early
/// is not late while its message is not needed. Thread-safe.
class TransferLimit {
 public:
  /// Gets the reason why a transfer that is still under way has not ended.
  using Late = std::function<void(const std::exception_ptr&)>;

  explicit TransferLimit(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  /// Starts the clock when a wait begins. Only the first call counts.
  void start() noexcept {
    Clock::rep never = kNever;
    end_.compare_exchange_strong(never, Deadline::after(timeout_).at().time_since_epoch().count());
  }

  bool started() const { return end_.load() != kNever; }
  bool passed() const { return Clock::now().time_since_epoch().count() >= end_.load(); }
  std::chrono::milliseconds timeout() const { return timeout_; }

  /// For a future that is given out, since nothing shows whether anyone waits for it: `late` is called, at most once,
  /// when the timeout has passed from now on, and the transfer goes on.
  void watch(Late late) {
    const std::lock_guard<std::mutex> lock(mutex_);
    late_ = std::move(late);
    watch_end_ = Deadline::after(timeout_);
  }

  /// Returns the function given to watch(), once, when its time is over or the transfer is `hopeless`; otherwise an
  /// empty one.
  Late take_late(bool hopeless) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!watch_end_ || !(hopeless || watch_end_->passed())) return nullptr;
    watch_end_.reset();
    return std::exchange(late_, nullptr);
  }

 private:
  static constexpr Clock::rep kNever = Clock::time_point::max().time_since_epoch().count();

  const std::chrono::milliseconds timeout_;
  std::atomic<Clock::rep> end_{kNever};
  std::mutex mutex_;  // guards the two below
  Late late_;
  std::optional<Deadline> watch_end_;
};

using TransferLimitPtr = std::shared_ptr<TransferLimit>;

}  // namespace ours
