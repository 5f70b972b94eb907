#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace ours {

// How much of the machine this process may use, by the machine itself and by the limits of the process's cgroups
// (version 1 or 2) and their parents. `root` is prepended to /proc and /sys, so that tests can supply their own files.

/// The smallest CPU quota of its cgroups, in CPUs; infinity if there is none. Other processes may share the quota.
double cpu_quota(const std::string& root = "");

struct MemoryRoom {
  uint64_t bytes;      ///< that can still be allocated before the OOM killer strikes
  std::string source;  ///< what says so
};

/// How much memory is left, by the tightest source; nothing if none can be read.
std::optional<MemoryRoom> memory_room(const std::string& root = "");

}  // namespace ours
