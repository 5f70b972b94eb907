#pragma once

#include <atomic>
#include <functional>
#include <mutex>
#include <string>

#include "transport/failure_kind.h"

namespace ours {

/// The failure that ended a group: the first that this rank found or heard of. From then on every call throws the same
/// error. Thread-safe.
class GroupFailure {
 public:
  using Listener = std::function<void(FailureKind, const std::string&)>;

  /// Records the failure and returns true if it is the first one.
  bool record(FailureKind kind, const std::string& message);

  /// `listener` is called with the failure on the thread that records it. Must be set before anything can fail.
  void set_listener(Listener listener) { listener_ = std::move(listener); }

  bool failed() const { return failed_.load(std::memory_order_acquire); }
  FailureKind kind() const;
  std::string message() const;

  /// Throws the failure, if there is one.
  void check() const;

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> failed_{false};
  FailureKind kind_ = FailureKind::None;
  std::string message_;
  Listener listener_;
};

}  // namespace ours
