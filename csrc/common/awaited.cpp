#include "common/awaited.h"

#include <pthread.h>

#include <exception>
#include <map>
#include <mutex>

namespace ours {

namespace {

/// Never destroyed, because groups may outlive main(). Locked during a fork; a child's calls wait for nobody yet.
struct Registry {
  std::mutex mutex;
  std::map<const Awaited*, std::string> waits;  // guarded by mutex

  static Registry& get() {
    static Registry* const registry = [] {
      auto* const made = new Registry;
      ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                       [] {
                         get().waits.clear();
                         get().mutex.unlock();
                       });
      return made;
    }();
    return *registry;
  }
};

}  // namespace

void Awaited::set(const std::string& whom) noexcept {
  if (whom == whom_) return;
  try {
    whom_ = whom;
    Registry& all = Registry::get();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (whom.empty()) {
      all.waits.erase(this);
    } else {
      all.waits[this] = whom;
    }
  } catch (const std::exception&) {
    // Out of memory: others hear less.
  }
}

std::string describe_awaited() {
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::string text;
  for (const auto& [call, whom] : all.waits) text += (text.empty() ? "; it waits for " : " and for ") + whom;
  return text;
}

}  // namespace ours
