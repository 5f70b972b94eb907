#pragma once

#include <stdexcept>
#include <string>

// The exceptions of the torch-free layers. backend/errors.cpp turns them into the types that PyTorch users catch
// (ValueError, DistBackendError, DistNetworkError). Each message says what happened, to whom, and what to do next.

namespace ours {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller asked for something invalid; nothing was sent. Becomes ValueError.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// The operating system refused something (memory, descriptors, mappings). Becomes DistBackendError.
class SystemError : public Error {
 public:
  /// Appends strerror(errno_value) to `what`, and the number of descriptors if they have run out.
  SystemError(const std::string& what, int errno_value);
};

/// Ranks made different calls under the same sequence number. Becomes DistBackendError.
class MismatchError : public Error {
 public:
  using Error::Error;
};

/// A deadline passed before every rank arrived. Becomes DistBackendError.
class TimeoutError : public Error {
 public:
  using Error::Error;
};

/// A peer died or left the group. Becomes DistNetworkError.
class PeerError : public Error {
 public:
  using Error::Error;
};

/// abort() was called here or by a peer. Becomes DistBackendError.
class AbortedError : public Error {
 public:
  using Error::Error;
};

}  // namespace ours
