#include "backend/timeouts.h"

#include <algorithm>

namespace ours {

void Timeouts::extend(std::chrono::milliseconds extra) {
  std::lock_guard<std::mutex> lock(mutex_);
  extensions_.push_back({extra, 0});
  extended_.store(true, std::memory_order_release);
}

std::chrono::milliseconds Timeouts::assign(std::chrono::milliseconds requested, uint64_t key) {
  std::chrono::milliseconds timeout = requested.count() < 0 ? get() : requested;
  if (!extended_.load(std::memory_order_acquire)) return timeout;
  std::lock_guard<std::mutex> lock(mutex_);
  for (Extension& extension : extensions_) {
    if (extension.first_work == 0) extension.first_work = key;
    timeout += extension.extra;
  }
  return timeout;
}

void Timeouts::completed(uint64_t key) {
  if (!extended_.load(std::memory_order_acquire)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  extensions_.erase(std::remove_if(extensions_.begin(), extensions_.end(),
                                   [key](const Extension& extension) { return extension.first_work == key; }),
                    extensions_.end());
  extended_.store(!extensions_.empty(), std::memory_order_release);
}

}  // namespace ours
