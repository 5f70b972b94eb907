#include "backend/errors.h"

#include "common/error.h"

namespace ours {

c10d::ErrorType error_type_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument&) {
    return c10d::ErrorType::SUCCESS;
  } catch (const c10::ValueError&) {
    return c10d::ErrorType::SUCCESS;
  } catch (const TimeoutError&) {
    return c10d::ErrorType::TIMEOUT;
  } catch (const PeerError&) {
    return c10d::ErrorType::REMOTE_ERROR;
  } catch (...) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

void throw_misuse(const c10::ValueError& error) {
  throw MisuseError(c10::SourceLocation{__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                    error.what_without_backtrace());
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& e) {
    return e.what_without_backtrace();
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "unknown error";
  }
}

namespace {

/// Gloo's words for a lost peer, for programs that look for them.
constexpr const char* kLostPeer = " (Connection closed by peer)";

template <class Torch>
std::exception_ptr make(const std::string& message) {
  return std::make_exception_ptr(
      Torch(c10::SourceLocation{__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message));
}

}  // namespace

std::exception_ptr to_torch(const std::exception_ptr& error, const std::string& where) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    return make<MisuseError>(e.what());
  } catch (const PeerError& e) {
    return make<c10::DistNetworkError>(e.what() + where + kLostPeer);
  } catch (const Error& e) {
    return make<c10::DistBackendError>(e.what() + where);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace ours
