#include "common/owning_process.h"

#include <pthread.h>

#include <atomic>

namespace ours {

namespace {

std::atomic<uint64_t> count{0};

// When the library is loaded. At the first call, a fork by another thread could come in between.
[[maybe_unused]] const int kRegistered = ::pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1); });

}  // namespace

uint64_t OwningProcess::forks() { return count.load(std::memory_order_relaxed); }

}  // namespace ours
