#include "transport/own_cores.h"

#include <sched.h>

#include <algorithm>
#include <functional>
#include <limits>

#include "common/machine_share.h"

namespace ours {

CoreShare own_share() {
  static_assert(CPU_SETSIZE == kMostCores);
  CoreShare share{};
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (size_t core = 0; core < kMostCores; ++core) {
      if (CPU_ISSET(core, &set)) share.allowed[core / 64] |= uint64_t{1} << core % 64;
    }
  }
  constexpr auto kMost = static_cast<double>(std::numeric_limits<uint32_t>::max());
  share.quota = static_cast<uint32_t>(std::min(cpu_quota(), kMost));
  return share;
}

// Ranks and cores are matched one rank after another; a rank that finds all of its cores taken asks the others to move
// on (Kuhn's algorithm).
bool have_own_cores(const std::vector<CoreShare>& ranks) {
  if (std::any_of(ranks.begin(), ranks.end(), [&](const CoreShare& one) { return one.quota < ranks.size(); })) {
    return false;
  }
  constexpr int kNobody = -1;
  std::vector<int> taken(kMostCores, kNobody);
  std::vector<char> asked;
  const std::function<bool(int)> place = [&](int rank) {
    for (size_t core = 0; core < kMostCores; ++core) {
      const uint64_t word = ranks[static_cast<size_t>(rank)].allowed[core / 64];
      if (asked[core] != 0 || (word >> core % 64 & 1) == 0) continue;
      asked[core] = 1;
      if (taken[core] == kNobody || place(taken[core])) {
        taken[core] = rank;
        return true;
      }
    }
    return false;
  };
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    asked.assign(kMostCores, 0);
    if (!place(static_cast<int>(rank))) return false;
  }
  return true;
}

}  // namespace ours
