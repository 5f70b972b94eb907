#include "common/owning_process.h"

#include <pthread.h>

#include <atomic>

namespace ours {

uint64_t OwningProcess::forks() {
  static std::atomic<uint64_t> count{0};
  static const int kRegistered = ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });
  static_cast<void>(kRegistered);
  return count.load(std::memory_order_relaxed);
}

}  // namespace ours
