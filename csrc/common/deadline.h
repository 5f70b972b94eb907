#pragma once

#include <algorithm>
#include <chrono>

namespace ours {

using Clock = std::chrono::steady_clock;

/// A point in time after which a wait gives up, and the timeout that it was made from (for messages).
class Deadline {
 public:
  /// `timeout` after `begin`, by default after now.
  static Deadline after(std::chrono::milliseconds timeout, Clock::time_point begin = Clock::now()) {
    return {std::clamp<std::chrono::milliseconds>(timeout, -kNever, kNever), begin};
  }

  static Deadline never() { return {kNever, Clock::time_point()}; }

  bool passed() const { return Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }
  /// When half of the timeout has passed.
  Clock::time_point half() const { return at_ - timeout_ / 2; }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  /// A timeout that is too long for the clock means "never"; 100 years is never, even from the clock's zero on.
  static constexpr std::chrono::hours kNever{24 * 365 * 100};

  Deadline(std::chrono::milliseconds timeout, Clock::time_point begin) : timeout_(timeout), at_(begin + timeout) {}

  std::chrono::milliseconds timeout_;
  Clock::time_point at_;
};

}  // namespace ours
