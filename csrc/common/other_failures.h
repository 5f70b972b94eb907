#pragma once

#include <string>

#include "common/deadline.h"

// A program gives up all its groups when one of them fails. The ranks of the others see only that it leaves, and would
// look for the fault there. So a rank that leaves a group says which other one has failed.

namespace ours {

/// How many bytes of a failure are remembered.
constexpr size_t kMaxReason = 1000;

/// Remembers a failure of a group of this process. Thread-safe, as is the next function.
void remember_failure(const std::string& message) noexcept;

/// The last failure of a group of this process if it came after `since`, and in the last minute; otherwise empty.
std::string failure_since(Clock::time_point since);

/// The end of the error of a rank that waits for `leaver`, which has left and gave that reason; empty if it gave none.
std::string describe_reason(const std::string& leaver, const std::string& reason);

}  // namespace ours
