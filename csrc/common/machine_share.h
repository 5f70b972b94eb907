#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ours {

// What this process may use of its machine, according to the machine and to the process's cgroups (version 1 or 2) and
// their parents. `root` is put before /proc and /sys; tests put files of their own there.

/// The number of CPUs whose time the quotas of its cgroups allow; infinity if there is no quota. Other processes may
/// share them.
double cpu_quota(const std::string& root = "");

struct MemoryRoom {
  uint64_t bytes;      ///< available before the system kills processes
  std::string source;  ///< what says so
};

/// Nothing if no source is readable.
std::optional<MemoryRoom> memory_room(const std::string& root = "");

}  // namespace ours
