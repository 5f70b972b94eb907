#pragma once

#include <chrono>
#include <functional>

namespace ours {

/// Starts a detached thread that runs `body` with all signals blocked: they are the main thread's business, where
/// Python's handlers run. `body` must own what it uses and must not throw. `name`: at most 15 characters, for
/// debuggers. Throws std::system_error where there can be no more threads.
void start_background_thread(const char* name, std::function<void()> body);

/// Runs `body` on such a thread for a call that may never return, and waits for at most `patience`. Whether it has
/// ended, and what it owned is dropped; if not, the thread is left behind with it.
bool ends_in_background(const char* name, std::function<void()> body, std::chrono::milliseconds patience);

}  // namespace ours
