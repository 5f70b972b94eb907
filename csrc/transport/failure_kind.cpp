#include "transport/failure_kind.h"

#include "common/error.h"

namespace ours {

void throw_as(FailureKind kind, const std::string& message) {
  switch (kind) {
    case FailureKind::Mismatch:
      throw MismatchError(message);
    case FailureKind::Timeout:
      throw TimeoutError(message);
    case FailureKind::Peer:
      throw PeerError(message);
    case FailureKind::Aborted:
      throw AbortedError(message);
    default:
      throw Error(message);
  }
}

FailureKind kind_of(const std::exception_ptr& error, std::string& message) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument&) {
    return FailureKind::None;
  } catch (const std::exception& e) {
    message = e.what();
    if (dynamic_cast<const MismatchError*>(&e) != nullptr) return FailureKind::Mismatch;
    if (dynamic_cast<const TimeoutError*>(&e) != nullptr) return FailureKind::Timeout;
    if (dynamic_cast<const PeerError*>(&e) != nullptr) return FailureKind::Peer;
    if (dynamic_cast<const AbortedError*>(&e) != nullptr) return FailureKind::Aborted;
  } catch (...) {
    message = "unknown error";
  }
  return FailureKind::System;
}

}  // namespace ours
