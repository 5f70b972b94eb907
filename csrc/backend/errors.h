#pragma once

#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ours {

/// An invalid call. It is a ValueError, and also a RuntimeError for Python code that expects what Gloo raises: see
/// csrc/python/module.cpp.
class MisuseError final : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};

[[noreturn]] void throw_misuse(const c10::ValueError& error);

/// What getError() reports for a failure. SUCCESS for InvalidArgument, which does not end a group.
c10d::ErrorType error_type_of(const std::exception_ptr& error);

/// The message of an error, without the place in the source that raised it.
std::string message_of(const std::exception_ptr& error);

/// The same error in the type that PyTorch users catch: MisuseError, DistBackendError or DistNetworkError. Other errors
/// are returned unchanged. `where` (may be empty) is appended to the message.
std::exception_ptr to_torch(const std::exception_ptr& error, const std::string& where);

/// Runs `body`, and turns the errors of the torch-free layers into the types that PyTorch users catch.
template <class Body>
auto with_torch_errors(const std::string& where, Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (...) {
    std::rethrow_exception(to_torch(std::current_exception(), where));
  }
}

}  // namespace ours
