#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ours {

// What this process may use of its machine, as far as the machine and the process's cgroups (version 1 or 2, and those
// above them) tell. `root` stands before /proc and /sys; tests have files of their own there.

/// How many CPUs' time the quotas of its cgroups leave it; infinity where there is no quota. Other processes may share
/// them.
double cpu_quota(const std::string& root = "");

struct MemoryRoom {
  uint64_t bytes;      ///< that can be taken before the system ends processes
  std::string source;  ///< what says so
};

/// Nothing where nobody tells.
std::optional<MemoryRoom> memory_room(const std::string& root = "");

}  // namespace ours
