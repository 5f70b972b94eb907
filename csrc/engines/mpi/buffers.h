#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ours::mpi {

/// Memory for a message, whose size is a power of two.
struct Buffer {
  std::unique_ptr<char[]> memory;
  int level = 0;  ///< the exponent
};

/// Keeps buffers for later messages, so that a network that registers memory with its hardware need not do it again.
class Buffers {
 public:
  Buffer take(size_t bytes) {
    int level = kSmallest;
    while ((size_t{1} << level) < bytes) ++level;
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& free = free_[level];
    if (free.empty()) return {std::unique_ptr<char[]>(new char[size_t{1} << level]), level};
    Buffer buffer = std::move(free.back());
    free.pop_back();
    return buffer;
  }

  void give_back(Buffer buffer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_[buffer.level].push_back(std::move(buffer));
  }

 private:
  static constexpr int kSmallest = 12;

  std::mutex mutex_;
  std::array<std::vector<Buffer>, 64> free_;
};

}  // namespace ours::mpi
