#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ours {

/// The number of CPUs that are told apart; a rank that may run only on others counts as one that has none.
constexpr size_t kMostCores = 1024;

/// What a rank may use of its machine. Lies in shared memory.
struct CoreShare {
  std::array<uint64_t, kMostCores / 64> allowed;  ///< a bit for each CPU that it may run on
  uint32_t quota;                                 ///< whole CPUs' time that its cgroups leave it; they may share them
};

/// CPUs that the calling thread may run on; empty if the system does not say.
std::vector<int> allowed_cores();

/// The socket on which a CPU is, as the system numbers them; the same for all where the system does not say.
int socket_of(int core);

/// The socket of all of those CPUs; -1 if they are on several, or if the system does not say.
int socket_of_all(const std::vector<int>& cores);

/// The share of this process.
CoreShare own_share();

/// Whether every rank can have a core of its own: together they may run on as many CPUs as there are ranks, and no
/// quota leaves less time than all of them use. Ranks that are each pinned to a core have their own, too.
bool have_own_cores(const std::vector<CoreShare>& ranks);

}  // namespace ours
