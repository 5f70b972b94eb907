#include "common/other_failures.h"

#include <exception>
#include <mutex>
#include <utility>

#include "common/whole_characters.h"

namespace ours {

namespace {

struct Last {
  std::mutex mutex;
  Clock::time_point at;  // guarded by mutex, as is the message
  std::string message;

  /// Never destroyed, because groups may outlive main().
  static Last& get() {
    static Last* const last = new Last;
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
  return last.at > since ? last.message : "";
}

std::string describe_reason(const std::string& leaver, const std::string& reason) {
  return reason.empty() ? "" : "\nBefore " + leaver + " left, another of its groups had failed: " + reason;
}

}  // namespace ours
