#pragma once

#include <algorithm>
#include <chrono>

namespace ours {

using Clock = std::chrono::steady_clock;

/// A point in time after which a wait gives up, and the timeout that it was made from (for messages).
class Deadline {
 public:
  static Deadline after(std::chrono::milliseconds timeout) {
    // A timeout that is too long for the clock means "never"; 100 years is never.
    constexpr auto kNever = std::chrono::hours(24 * 365 * 100);
    return Deadline(std::clamp<std::chrono::milliseconds>(timeout, -kNever, kNever));
  }

  static Deadline never() { return after(std::chrono::milliseconds::max()); }

  bool passed() const { return Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }
  /// When half of the timeout has passed.
  Clock::time_point half() const { return at_ - timeout_ / 2; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  explicit Deadline(std::chrono::milliseconds timeout) : timeout_(timeout), at_(Clock::now() + timeout) {}

  std::chrono::milliseconds timeout_;
  Clock::time_point at_;
};

}  // namespace ours
