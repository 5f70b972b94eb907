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

std::string timed_out(const std::string& what, Deadline deadline, const std::string& self, const Culprits& culprits) {
  return what + ": Timed out waiting " + std::to_string(deadline.timeout().count()) + "ms on " + self + " for " +
         culprits.names + ". Are they still computing (raise the timeout), stopped, or on another code path?" +
         culprits.places;
}

std::string lost_peer(const std::string& peer, const std::string& how, const std::string& when,
                      const std::string& self) {
  return peer + ' ' + how + when + "; noticed by " + self +
         ". The group cannot be used any more; make a new one without it";
}

std::string aborted(const std::string& self, const std::string& reason) {
  return self + " aborted the group" + (reason.empty() ? "" : ": " + reason);
}

}  // namespace ours
