#include "common/stop_request.h"

#include <atomic>

namespace ours {

namespace {

// A signal is sent to the process, so what it asks for is the process's as well.
std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free, "signal handlers need atomics without locks");

}  // namespace

void request_stop() noexcept { requested.store(true); }

bool stop_requested() noexcept { return requested.load(); }

void forget_stop_request() noexcept { requested.store(false); }

}  // namespace ours
