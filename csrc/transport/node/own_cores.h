#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ours {

/// How many CPUs are told apart; a rank that may run on others only counts as one that has none.
constexpr size_t kMostCores = 1024;

/// What a rank may use of its machine. It lies in shared memory.
struct CoreShare {
  std::array<uint64_t, kMostCores / 64> allowed;  ///< a bit for each CPU that it may run on
  uint32_t quota;                                 ///< whole CPUs' time that its cgroups leave it; they may share them
};

/// This process's.
CoreShare own_share();

/// Whether every rank can have a core of its own: they may run on as many CPUs, together, as there are ranks, and no
/// quota leaves less time than all of them use. Ranks that are pinned to a core each have their own, too.
bool have_own_cores(const std::vector<CoreShare>& ranks);

}  // namespace ours
