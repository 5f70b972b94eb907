#include "common/interpreter_lock.h"

#include <atomic>

namespace ours {

namespace {

std::atomic<void* (*)()> release_lock{nullptr};
std::atomic<void (*)(void*)> restore_lock{nullptr};

void* release() {
  void* (*const function)() = release_lock.load();
  return function == nullptr ? nullptr : function();
}

}  // namespace

void set_interpreter_lock(void* (*release)(), void (*restore)(void* state)) {
  restore_lock.store(restore);
  release_lock.store(release);
}

WithoutInterpreterLock::WithoutInterpreterLock() : state_(release()) {}

WithoutInterpreterLock::~WithoutInterpreterLock() {
  if (state_ != nullptr) restore_lock.load()(state_);
}

}  // namespace ours
