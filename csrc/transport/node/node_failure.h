#pragma once

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "transport/group_failure.h"
#include "transport/node/node_layout.h"

namespace ours {

/// The failure that ended a group. The first rank that fails writes it into the segment, where all others find it;
/// from then on every call on every rank throws the same error.
class NodeFailure {
 public:
  /// `words`: all on which threads of the group may sleep.
  NodeFailure(SegmentHeader& header, std::vector<SleepWord*> words) : header_(header), words_(std::move(words)) {}

  /// Records the failure (unless there is one) here and, as far as possible, for the peers, and wakes every sleeper.
  void fail(FailureKind kind, const std::string& message) noexcept;

  /// Records `error` with its kind. InvalidArgument is no failure of the group.
  void fail(const std::exception_ptr& error) noexcept;

  /// Throws the group's failure, if there is one.
  void check();

  /// Throws the group's failure; if there is none, records and throws this one.
  [[noreturn]] void raise(FailureKind kind, const std::string& message);

  bool failed() const;

  /// Whether every peer that checks from now on finds a failure.
  bool told() const;

  FailureKind kind();

  /// The message of the failure, or empty.
  std::string message();

 private:
  /// Takes over a failure that a peer has written.
  void adopt();

  SegmentHeader& header_;
  const std::vector<SleepWord*> words_;
  GroupFailure own_;
};

}  // namespace ours
