#include "transport/node/own_cores.h"

#include <sched.h>

#include <algorithm>
#include <bitset>
#include <fstream>
#include <limits>
#include <string>

#include "common/machine_share.h"

namespace ours {

std::vector<int> allowed_cores() {
  cpu_set_t set;
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof(set), &set) != 0) return cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

int socket_of(int core) {
  static const std::vector<int> sockets = [] {
    std::vector<int> found(kMostCores, -1);
    for (size_t one = 0; one < kMostCores; ++one) {
      std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(one) + "/topology/physical_package_id");
      file >> found[one];
    }
    return found;
  }();
  return core >= 0 && core < static_cast<int>(kMostCores) ? sockets[static_cast<size_t>(core)] : -1;
}

CoreShare own_share() {
  static_assert(CPU_SETSIZE == kMostCores);
  CoreShare share{};
  for (const int core : allowed_cores()) {
    share.allowed[static_cast<size_t>(core) / 64] |= uint64_t{1} << static_cast<size_t>(core) % 64;
  }
  constexpr auto kMost = static_cast<double>(std::numeric_limits<uint32_t>::max());
  share.quota = static_cast<uint32_t>(std::min(cpu_quota(), kMost));
  return share;
}

bool have_own_cores(const std::vector<CoreShare>& ranks) {
  std::bitset<kMostCores> together;
  for (const CoreShare& one : ranks) {
    if (one.quota < ranks.size()) return false;
    for (size_t core = 0; core < kMostCores; ++core) {
      if ((one.allowed[core / 64] >> core % 64 & 1) != 0) together.set(core);
    }
  }
  return together.count() >= ranks.size();
}

}  // namespace ours
