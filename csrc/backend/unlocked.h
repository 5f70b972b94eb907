#pragma once

#include <functional>

namespace ours {

/// Runs `wait`, in which the host waits for a Work, without the GIL. torch's binding of Work.synchronize() holds the
/// GIL, since with other backends only streams wait there; but the Work's end may need the GIL to drop Python tensors.
void run_unlocked(const std::function<void()>& wait);

/// Sets how to release the GIL around a wait. The Python layer calls it when it is loaded.
void set_unlocker(void (*unlocker)(const std::function<void()>& wait));

}  // namespace ours
