#include "transport/node/own_cores.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <atomic>
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
  constexpr int kNone = -1;
  if (core < 0 || core >= static_cast<int>(kMostCores)) return kNone;
  // Read once; 0 stands for what has not been.
  static std::array<std::atomic<int>, kMostCores> known{};
  constexpr int kFirst = 2;
  std::atomic<int>& socket = known[static_cast<size_t>(core)];
  if (socket.load(std::memory_order_relaxed) == 0) {
    int found = kNone;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/physical_package_id");
    file >> found;
    socket.store(found + kFirst, std::memory_order_relaxed);
  }
  return socket.load(std::memory_order_relaxed) - kFirst;
}

int socket_of_all(const std::vector<int>& cores) {
  const int first = cores.empty() ? -1 : socket_of(cores.front());
  const bool same = std::all_of(cores.begin(), cores.end(), [&](int core) { return socket_of(core) == first; });
  return same ? first : -1;
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
