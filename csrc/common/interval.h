#pragma once

#include <chrono>
#include <cstdint>
#include <optional>

namespace ours {

inline int64_t steady_ns(std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now()) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

inline int64_t steady_us(std::chrono::steady_clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time.time_since_epoch()).count();
}

/// When something ran, in nanoseconds of the steady clock.
struct Interval {
  int64_t began = 0;
  int64_t ended = 0;
};

/// Something that knows when it ran. Through it the reducer reads the times of Works without knowing their backend.
class Timed {
 public:
  virtual ~Timed() = default;
  /// Nothing while it is running.
  virtual std::optional<Interval> interval() const = 0;
};

}  // namespace ours
