#pragma once

#include <unistd.h>

#include <cstddef>
#include <optional>

namespace ours {

enum class Cache : int { Second = _SC_LEVEL2_CACHE_SIZE, Last = _SC_LEVEL3_CACHE_SIZE };

/// The size of a core's cache, where the system tells it.
inline std::optional<size_t> cache_bytes(Cache cache) {
  const long known = ::sysconf(static_cast<int>(cache));
  if (known <= 0) return std::nullopt;
  return static_cast<size_t>(known);
}

}  // namespace ours
