#pragma once

#include <string>

#include "common/deadline.h"

namespace ours {

/// Where the ranks of one group leave word for each other before they are connected. Keys are the group's alone: no
/// other group, and no earlier attempt of it, uses the same ones. Callable from several threads at once.
class KeyValues {
 public:
  virtual ~KeyValues() = default;

  virtual void set(const std::string& key, const std::string& value) = 0;

  /// Waits until somebody has set the key. Throws TimeoutError when the deadline passes, which is often near: who
  /// waits for a key looks after its connections meanwhile.
  virtual std::string get(const std::string& key, Deadline deadline) = 0;
};

}  // namespace ours
