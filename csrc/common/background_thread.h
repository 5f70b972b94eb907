#pragma once

#include <chrono>
#include <functional>

namespace ours {

/// Starts a detached thread that runs `body`, which must own what it uses and must not throw. Signals are blocked
/// there, since they have to arrive on the main thread, where Python's handlers run. `name` is for debuggers, with at
/// most 15 characters. Throws std::system_error if no thread can be started.
void start_background_thread(const char* name, std::function<void()> body);

/// Runs `body`, which may never return, on such a thread, and waits for at most `patience`. Returns whether `body` has
/// returned and been destroyed; otherwise the thread is left behind.
bool ends_in_background(const char* name, std::function<void()> body, std::chrono::milliseconds patience);

}  // namespace ours
