#include "transport/tcp/tcp_failure.h"

#include "common/error.h"

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

FailureKind TcpFailure::kind_of(const std::exception_ptr& error, std::string& message) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument&) {
    return FailureKind::None;
  } catch (const MismatchError& e) {
    message = e.what();
    return FailureKind::Mismatch;
  } catch (const TimeoutError& e) {
    message = e.what();
    return FailureKind::Timeout;
  } catch (const PeerError& e) {
    message = e.what();
    return FailureKind::Peer;
  } catch (const AbortedError& e) {
    message = e.what();
    return FailureKind::Aborted;
  } catch (const std::exception& e) {
    message = e.what();
  } catch (...) {
    message = "unknown error";
  }
  return FailureKind::System;
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
  const std::string text = message();
  switch (kind()) {
    case FailureKind::Mismatch:
      throw MismatchError(text);
    case FailureKind::Timeout:
      throw TimeoutError(text);
    case FailureKind::Peer:
      throw PeerError(text);
    case FailureKind::Aborted:
      throw AbortedError(text);
    default:
      throw Error(text);
  }
}

}  // namespace ours
