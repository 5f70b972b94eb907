#pragma once

#include <functional>
#include <string>

#include "common/deadline.h"
#include "common/error.h"

namespace ours {

/// A key-value store through which the ranks of a group exchange strings before they are connected. Its keys are not
/// shared with other groups, or with earlier attempts to create this one. Thread-safe.
class KeyValues {
 public:
  virtual ~KeyValues() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  /// Waits until the key is set. Throws TimeoutError when the deadline passes.
  virtual std::string get(const std::string& key, Deadline deadline) = 0;

  /// The value of the key if that takes no time, or an empty string.
  virtual std::string known(const std::string& /*key*/) { return ""; }

  /// Like get(), but calls `look_around` about every 50 ms, which may throw to end the wait.
  virtual std::string await(const std::string& key, Deadline deadline, const std::function<void()>& look_around) {
    constexpr std::chrono::milliseconds kSlice{50};
    while (true) {
      try {
        return get(key, Deadline::after(kSlice));
      } catch (const TimeoutError&) {
        look_around();
        if (deadline.passed()) throw;
      }
    }
  }
};

}  // namespace ours
