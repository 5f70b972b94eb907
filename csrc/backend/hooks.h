#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

namespace ours {

/// Functions that users register, by id. They are called, copied and destroyed without the lock, since they may take
/// the GIL or register other hooks.
template <class... Args>
class HookTable {
 public:
  using Hook = std::function<void(Args...)>;

  void add(int64_t id, Hook hook) {
    auto entry = std::make_shared<const Hook>(std::move(hook));
    std::lock_guard<std::mutex> lock(mutex_);
    hooks_[id].swap(entry);
    empty_.store(false, std::memory_order_release);
  }

  void remove(int64_t id) {
    std::shared_ptr<const Hook> removed;
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = hooks_.find(id);
    if (found == hooks_.end()) return;
    removed = std::move(found->second);
    hooks_.erase(found);
    empty_.store(hooks_.empty(), std::memory_order_release);
  }

  /// Takes over the hooks of another table.
  void add_all(const HookTable& other) {
    const std::scoped_lock lock(mutex_, other.mutex_);
    hooks_.insert(other.hooks_.begin(), other.hooks_.end());
    empty_.store(hooks_.empty(), std::memory_order_release);
  }

  bool empty() const { return empty_.load(std::memory_order_acquire); }

  /// Calls all hooks. An exception of a hook becomes a warning, since it must not fail a collective.
  void call(Args... args) const {
    if (empty()) return;
    std::vector<std::shared_ptr<const Hook>> hooks;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const auto& entry : hooks_) hooks.push_back(entry.second);
    }
    for (const auto& hook : hooks) {
      try {
        (*hook)(args...);
      } catch (const std::exception& e) {
        TORCH_WARN("a hook of backend ours raised: ", e.what());
      }
    }
  }

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<const Hook>> hooks_;
  std::atomic<bool> empty_{true};
};

}  // namespace ours
