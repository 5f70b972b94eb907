#pragma once

#include <cstdint>
#include <exception>
#include <string>

namespace ours {

/// The errors that end a group, as they travel between ranks.
enum class FailureKind : uint32_t { None, System, Mismatch, Timeout, Peer, Aborted };

/// Throws the error of that kind.
[[noreturn]] void throw_as(FailureKind kind, const std::string& message);

/// The kind of `error`; None for InvalidArgument, which is no failure of the group. `message` gets its text.
FailureKind kind_of(const std::exception_ptr& error, std::string& message);

}  // namespace ours
