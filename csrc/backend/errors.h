#pragma once

#include <exception>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace ours {

/// A call that has no meaning. It is a ValueError that Python code which expects Gloo's RuntimeError catches, too: see
/// csrc/python/module.cpp.
class MisuseError final : public c10::ValueError {
 public:
  using c10::ValueError::ValueError;
};

/// Throws the same as MisuseError.
[[noreturn]] void throw_misuse(const c10::ValueError& error);

/// What getError() reports for a failure; SUCCESS for InvalidArgument, which does not end a group.
c10d::ErrorType error_type_of(const std::exception_ptr& error);

/// The message of an error, without where in the program it was made.
std::string message_of(const std::exception_ptr& error);

/// The same error in the type that PyTorch users catch: MisuseError, DistBackendError or DistNetworkError. Errors of
/// other origins stay what they are. `where` (may be empty) is appended.
std::exception_ptr to_torch(const std::exception_ptr& error, const std::string& where);

/// Runs `body`; an error of the torch-free layers leaves it as the type that PyTorch users catch.
template <class Body>
auto with_torch_errors(const std::string& where, Body&& body) -> decltype(body()) {
  try {
    return body();
  } catch (...) {
    std::rethrow_exception(to_torch(std::current_exception(), where));
  }
}

}  // namespace ours
