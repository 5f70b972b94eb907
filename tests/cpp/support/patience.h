#pragma once

#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>

#include "support/testing.h"

// For tests of what must happen soon: on a busy machine a thread may not run for hundreds of milliseconds.

namespace ours::testing {

/// Fails unless one of several tries, each of which returns its nanoseconds, took less than `limit`. A delay in the
/// code itself shows in every try.
inline void check_soon(std::chrono::nanoseconds limit, const std::function<int64_t()>& one_try) {
  int64_t took = 0;
  for (int i = 0; i < 5; ++i) {
    took = one_try();
    if (took < limit.count()) return;
  }
  throw Failure("took " + std::to_string(took / 1000000) + " ms even the fifth time");
}

/// Runs a test with a short timeout, and with longer ones if that fails, so that the ranks that are expected to come
/// in time have more of it.
inline void with_growing_timeouts(const std::function<void(std::chrono::milliseconds)>& test) {
  for (const int timeout : {100, 400}) {
    try {
      return test(std::chrono::milliseconds(timeout));
    } catch (const std::exception&) {
      continue;
    }
  }
  test(std::chrono::milliseconds(1600));
}

}  // namespace ours::testing
