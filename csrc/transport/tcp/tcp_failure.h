#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <mutex>
#include <string>

#include "transport/node/node_failure.h"

namespace ours {

/// The failure that ended a group whose ranks share no memory: the first that this rank met or heard of. From then on
/// every call on it throws the same error. Safe among threads.
class TcpFailure {
 public:
  using Listener = std::function<void(FailureKind, const std::string&)>;

  /// True for the first failure, which is kept.
  bool record(FailureKind kind, const std::string& message);

  /// Who is told of the failure, on the thread that records it. Set before anything can fail.
  void set_listener(Listener listener) { listener_ = std::move(listener); }

  /// The kind that `error` is; None for InvalidArgument, which is no failure of the group.
  static FailureKind kind_of(const std::exception_ptr& error, std::string& message);

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
