#include "backend/unlocked.h"

#include <atomic>

namespace ours {

namespace {

std::atomic<void (*)(const std::function<void()>&)> run_with{nullptr};

}  // namespace

void run_unlocked(const std::function<void()>& wait) {
  const auto unlocker = run_with.load();
  return unlocker == nullptr ? wait() : unlocker(wait);
}

void set_unlocker(void (*unlocker)(const std::function<void()>& wait)) { run_with = unlocker; }

}  // namespace ours
