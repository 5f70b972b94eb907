#pragma once

#include <cstddef>
#include <vector>

namespace ours {

/// Memory that a group's operations use in turn, so that it is not allocated anew for each.
class Scratch {
 public:
  /// `bytes` bytes of any content that last until the next call.
  std::byte* take(size_t bytes) {
    if (memory_.size() < bytes) memory_ = std::vector<std::byte>(bytes);
    return memory_.data();
  }

 private:
  std::vector<std::byte> memory_;
};

}  // namespace ours
