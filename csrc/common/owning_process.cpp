#include "common/owning_process.h"

#include <pthread.h>

#include <atomic>

namespace ours {

namespace {

std::atomic<uint64_t> fork_count{0};

// Registered when the library is loaded, because another thread may fork during a first call.
[[maybe_unused]] const int kRegistered = ::pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });

}  // namespace

uint64_t OwningProcess::forks() { return fork_count.load(std::memory_order_relaxed); }

}  // namespace ours
