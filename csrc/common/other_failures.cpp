#include "common/other_failures.h"

#include <pthread.h>

#include <chrono>
#include <exception>
#include <mutex>
#include <utility>

#include "common/whole_characters.h"

namespace ours {

namespace {

/// How long a failure may be the reason for what comes after it.
constexpr std::chrono::minutes kRecent{1};

/// Never destroyed, because groups may outlive main(). Locked during a fork, so that no child inherits it half-changed.
struct Last {
  std::mutex mutex;
  Clock::time_point at;  // guarded by mutex, as is the message
  std::string message;

  static Last& get() {
    static Last* const last = [] {
      auto* const made = new Last;
      ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] { get().mutex.unlock(); });
      return made;
    }();
    return *last;
  }
};

}  // namespace

void remember_failure(const std::string& message) noexcept {
  try {
    std::string text = message.substr(0, whole_characters(message, kMaxReason));
    Last& last = Last::get();
    const std::lock_guard<std::mutex> lock(last.mutex);
    last.at = Clock::now();
    last.message = std::move(text);
  } catch (const std::exception&) {
    // Out of memory. The failure itself is reported all the same.
  }
}

std::string failure_since(Clock::time_point since) {
  Last& last = Last::get();
  const std::lock_guard<std::mutex> lock(last.mutex);
  return last.at > since && Clock::now() - last.at < kRecent ? last.message : "";
}

std::string describe_reason(const std::string& leaver, const std::string& reason) {
  return reason.empty() ? "" : "\nBefore " + leaver + " left, another of its groups had failed: " + reason;
}

}  // namespace ours
