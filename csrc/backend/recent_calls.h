#pragma once

#include <pthread.h>

#include <string>

#include "backend/profiling.h"

// The last calls of this process in any of its groups, for the errors of ranks that wait for it.

namespace ours {

/// Remembers the call, and that the calling thread made it.
void remember(const CallTrace& call);

/// "its last calls were all_reduce number 41 (1000 x Float, default_pg) and barrier number 40 (default_pg)", the latest
/// first; "it has made no call" if that is so.
std::string describe_recent_calls();

/// The thread that made the last call; 0 if there was none.
pthread_t last_caller();

}  // namespace ours
