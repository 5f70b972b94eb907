#include "device/keep_forever.h"

#include <mutex>
#include <utility>
#include <vector>

namespace ours {

void keep_forever(std::shared_ptr<void> memory) noexcept {
  // Never destroyed, as this may be called at the very end.
  static auto* const kMutex = new std::mutex;
  static auto* const kKept = new std::vector<std::shared_ptr<void>>;
  const std::lock_guard<std::mutex> lock(*kMutex);
  kKept->push_back(std::move(memory));
}

}  // namespace ours
