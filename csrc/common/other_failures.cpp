#include "common/other_failures.h"

#include <chrono>
#include <exception>
#include <mutex>
#include <utility>

#include "common/process_wide.h"
#include "common/whole_characters.h"

namespace ours {

namespace {

/// How long a failure may be the reason for what comes after it.
constexpr std::chrono::minutes kRecent{1};

struct Last {
  Clock::time_point at;
  std::string message;

  void in_child() {}
};

}  // namespace

void remember_failure(const std::string& message) noexcept {
  try {
    std::string text = message.substr(0, whole_characters(message, kMaxReason));
    auto& last = ProcessWide<Last>::get();
    const std::lock_guard<std::mutex> lock(last.mutex);
    last.value = {Clock::now(), std::move(text)};
  } catch (const std::exception&) {
    // Out of memory. The failure itself is reported all the same.
  }
}

std::string failure_since(Clock::time_point since) {
  auto& last = ProcessWide<Last>::get();
  const std::lock_guard<std::mutex> lock(last.mutex);
  return last.value.at > since && Clock::now() - last.value.at < kRecent ? last.value.message : "";
}

std::string describe_reason(const std::string& leaver, const std::string& reason) {
  return reason.empty() ? "" : "\nBefore " + leaver + " left, another of its groups had failed: " + reason;
}

}  // namespace ours
