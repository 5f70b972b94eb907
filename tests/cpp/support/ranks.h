#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "support/testing.h"

namespace ours::testing {

/// Runs fn(rank) for rank 0..n-1, each on a thread of its own, and returns what each threw (null: nothing). Threads
/// cannot be stopped from outside, so if some are not back after two minutes, the process ends with a message that
/// names them: a deadlock fails the run instead of hanging it.
std::vector<std::exception_ptr> run_ranks_catching(int n, const std::function<void(int)>& fn);

/// The message of an exception; empty if there is none.
std::string message_of(const std::exception_ptr& error);

/// Runs fn(rank) for n ranks as threads; fails with the messages of all ranks that threw.
void run_ranks(int n, const std::function<void(int)>& fn);

/// Returns when `state` does; fails after a minute.
void wait_until(const std::function<bool()>& state);

}  // namespace ours::testing
