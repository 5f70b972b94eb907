#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

namespace ours {

/// The timeouts of a group: its own one, and temporary extensions. An extension holds for every Work made after it
/// until the first of those completes. Extensions add up.
class Timeouts {
 public:
  explicit Timeouts(std::chrono::milliseconds group_timeout) : group_(group_timeout.count()) {}

  void set(std::chrono::milliseconds group_timeout) { group_.store(group_timeout.count()); }
  std::chrono::milliseconds get() const { return std::chrono::milliseconds(group_.load()); }

  void extend(std::chrono::milliseconds extra);

  /// The timeout of a new Work. `requested` < 0 asks for the group's. `key` identifies the Work for completed().
  std::chrono::milliseconds assign(std::chrono::milliseconds requested, uint64_t key);

  void completed(uint64_t key);

 private:
  struct Extension {
    std::chrono::milliseconds extra;
    uint64_t first_work;  // 0 until there is one
  };

  std::atomic<int64_t> group_;
  std::atomic<bool> extended_{false};  // saves taking the lock while there is no extension
  std::mutex mutex_;
  std::vector<Extension> extensions_;
};

}  // namespace ours
