#pragma once

#include <sys/random.h>
#include <sys/types.h>

#include <cerrno>
#include <type_traits>

#include "common/error.h"

namespace ours {

/// A value of random bits, which nobody can guess. Throws SystemError.
template <class T>
T draw_random() {
  static_assert(std::is_trivially_copyable_v<T>);
  T value;
  if (::getrandom(&value, sizeof(value), 0) != static_cast<ssize_t>(sizeof(value))) {
    throw SystemError("cannot draw a random number (getrandom)", errno);
  }
  return value;
}

}  // namespace ours
