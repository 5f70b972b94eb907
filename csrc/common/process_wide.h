#pragma once

#include <pthread.h>

#include <mutex>

namespace ours {

/// What a process has once, and the mutex that guards it. Never destroyed, because groups and tensors may outlive
/// main(). The mutex is locked during a fork, so that no child inherits the value half-changed or the mutex locked by a
/// thread that it does not have; then the child calls value.in_child(), which must take no lock. Whoever holds the
/// mutex must not take another one of this kind, because a fork takes them in an order of its own.
template <class Value>
struct ProcessWide {
  std::mutex mutex;
  Value value;

  static ProcessWide& get() { return *only; }

 private:
  static ProcessWide* make() noexcept {
    only = new ProcessWide;  // before the handlers are registered, which use it
    ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                     [] {
                       get().value.in_child();
                       get().mutex.unlock();
                     });
    return only;
  }

  // Made when the library is loaded, because another thread may fork while a first call makes it.
  static inline ProcessWide* only = make();
};

}  // namespace ours
