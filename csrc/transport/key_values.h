#pragma once

#include <functional>
#include <string>

#include "common/deadline.h"
#include "common/error.h"

namespace ours {

/// Where the ranks of one group leave word for each other before they are connected. Keys are the group's alone: no
/// other group, and no earlier attempt of it, uses the same ones. Callable from several threads at once.
class KeyValues {
 public:
  virtual ~KeyValues() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  /// Waits until somebody has set the key. Throws TimeoutError when the deadline passes.
  virtual std::string get(const std::string& key, Deadline deadline) = 0;

  /// The same, and looks after something meanwhile: calls `look_around` about every 50 ms, which may throw to
  /// end the wait.
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
