#include "transport/group_failure.h"

#include "common/other_failures.h"

namespace ours {

bool GroupFailure::record(FailureKind kind, const std::string& message) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kind_ != FailureKind::None || kind == FailureKind::None) return false;
    kind_ = kind;
    message_ = message;
    failed_.store(true, std::memory_order_release);
  }
  // To abort a group is a way to end it, mostly after another one has failed.
  if (kind != FailureKind::Aborted) remember_failure(message);
  if (listener_) listener_(kind, message);
  return true;
}

FailureKind GroupFailure::kind() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kind_;
}

std::string GroupFailure::message() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

void GroupFailure::check() const {
  if (!failed()) return;
  throw_as(kind(), message());
}

}  // namespace ours
