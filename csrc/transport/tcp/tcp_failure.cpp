#include "transport/tcp/tcp_failure.h"

namespace ours {

bool TcpFailure::record(FailureKind kind, const std::string& message) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (kind_ != FailureKind::None || kind == FailureKind::None) return false;
    kind_ = kind;
    message_ = message;
    failed_.store(true, std::memory_order_release);
  }
  if (listener_) listener_(kind, message);
  return true;
}

FailureKind TcpFailure::kind() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kind_;
}

std::string TcpFailure::message() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return message_;
}

void TcpFailure::check() const {
  if (!failed()) return;
  throw_as(kind(), message());
}

}  // namespace ours
