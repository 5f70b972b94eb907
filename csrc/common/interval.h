#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace ours {

/// Nanoseconds of the steady clock.
inline int64_t steady_ns(std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now()) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

/// From when to when something ran, in nanoseconds of the steady clock.
struct Interval {
  int64_t began = 0;
  int64_t ended = 0;
};

/// Something that knows when it ran. Lets the reducer ask the Works of a backend that it does not know otherwise.
class Timed {
 public:
  virtual ~Timed() = default;
  /// Nothing while it runs.
  virtual std::optional<Interval> interval() const = 0;
};

}  // namespace ours
