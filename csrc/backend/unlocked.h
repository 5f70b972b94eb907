#pragma once

#include <functional>

namespace ours {

/// Runs `wait`, which waits on the host for a Work, without a lock that its end may need. That is Python's: torch's
/// binding of Work.synchronize() keeps it, since streams wait there elsewhere, and tensors of Python cannot be dropped
/// meanwhile.
void run_unlocked(const std::function<void()>& wait);

/// How to let go of the lock for that long; the Python layer says so when it is loaded.
void set_unlocker(void (*unlocker)(const std::function<void()>& wait));

}  // namespace ours
