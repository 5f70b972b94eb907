#pragma once

namespace ours {

/// Sets how to release the lock of the language that the program is written in, on a thread that holds it. `release`
/// returns what `restore` needs, or null if the thread does not hold it. Until the layer of that language calls this,
/// there is no lock.
void set_interpreter_lock(void* (*release)(), void (*restore)(void* state));

/// Leaves that lock to other threads as long as it exists, for waits in calls that torch's own bindings make with it.
class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock();
  WithoutInterpreterLock(const WithoutInterpreterLock&) = delete;
  WithoutInterpreterLock& operator=(const WithoutInterpreterLock&) = delete;
  ~WithoutInterpreterLock();

 private:
  void* const state_;
};

}  // namespace ours
