#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "common/deadline.h"

namespace ours {

/// The errors that end a group, as they travel between ranks.
enum class FailureKind : uint32_t { None, System, Mismatch, Timeout, Peer, Aborted };

/// Throws the error of that kind.
[[noreturn]] void throw_as(FailureKind kind, const std::string& message);

/// The kind of `error`; None for InvalidArgument, which is no failure of the group. `message` gets its text.
FailureKind kind_of(const std::exception_ptr& error, std::string& message);

// What the failures of all kinds of groups say. `self` and the other ranks are named as "rank 2 (host node1, pid 17)".

/// Ranks that others wait for.
struct Culprits {
  std::string names;
  std::string places;  ///< where they are in their programs (see roll_call()), or empty
};

/// `self` waited for `culprits` in `what`.
std::string timed_out(const std::string& what, Deadline deadline, const std::string& self, const Culprits& culprits);
/// `how`: why `peer` will never come ("died"); `when`: " during all_reduce number 3", or nothing.
std::string lost_peer(const std::string& peer, const std::string& how, const std::string& when,
                      const std::string& self);
constexpr const char* kLeftGroup = "left the group (it destroyed it or ended before the others did)";
std::string aborted(const std::string& self, const std::string& reason);

}  // namespace ours
