#include "common/machine_share.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>
#include <vector>

namespace ours {

namespace {

constexpr const char* kCgroups = "/sys/fs/cgroup";

/// The number at the beginning of a file; nothing if there is none ("max", for instance) or the file cannot be read.
std::optional<int64_t> number_in(const std::string& path) {
  std::ifstream file(path);
  int64_t number = 0;
  if (file >> number) return number;
  return std::nullopt;
}

/// The number that follows `name` in a file of such lines; nothing if there is none.
std::optional<int64_t> number_after(const std::string& name, const std::string& path) {
  std::ifstream file(path);
  std::string word;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    int64_t number = 0;
    if (words >> word && word == name && words >> number) return number;
  }
  return std::nullopt;
}

/// Calls `look` with the folders of this process's cgroups for `controller`, from its own one up. In a container the
/// path that the process knows may not exist, but then the topmost folder is its own.
void for_each_cgroup(const std::string& root, const std::string& controller,
                     const std::function<void(const std::string& folder, bool version1)>& look) {
  std::ifstream list(root + "/proc/self/cgroup");
  for (std::string line; std::getline(list, line);) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool version1 = !controllers.empty();
    if (version1 && (',' + controllers + ',').find(',' + controller + ',') == std::string::npos) continue;
    const std::string base = root + kCgroups;
    const std::vector<std::string> mounts = version1 ? std::vector<std::string>{'/' + controllers, '/' + controller}
                                                     : std::vector<std::string>{"", "/unified"};
    for (const std::string& mount : mounts) {
      for (std::string path = line.substr(second + 1);; path.erase(path.rfind('/'))) {
        if (path == "/") path.clear();
        look(std::string(base).append(mount).append(path), version1);
        if (path.empty()) break;
      }
    }
  }
}

/// A cgroup's quota in CPUs; nothing if it has none.
std::optional<double> quota_of(const std::string& folder, bool version1) {
  std::optional<int64_t> quota;
  std::optional<int64_t> period;
  if (version1) {
    quota = number_in(folder + "/cpu.cfs_quota_us");
    period = number_in(folder + "/cpu.cfs_period_us");
  } else {
    std::ifstream file(folder + "/cpu.max");
    int64_t numbers[2];
    if (file >> numbers[0] >> numbers[1]) {
      quota = numbers[0];
      period = numbers[1];
    }
  }
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::nullopt;
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

/// The bytes that a cgroup can still take, including cached files that it can drop; nothing if it has no limit.
std::optional<uint64_t> room_in(const std::string& folder, bool version1) {
  const auto limit = number_in(folder + (version1 ? "/memory.limit_in_bytes" : "/memory.max"));
  const auto used = number_in(folder + (version1 ? "/memory.usage_in_bytes" : "/memory.current"));
  if (!limit || !used) return std::nullopt;
  const auto files = number_after(version1 ? "total_inactive_file" : "inactive_file", folder + "/memory.stat");
  return static_cast<uint64_t>(std::max<int64_t>(*limit - *used + files.value_or(0), 0));
}

}  // namespace

double cpu_quota(const std::string& root) {
  double least = std::numeric_limits<double>::infinity();
  for_each_cgroup(root, "cpu", [&](const std::string& folder, bool version1) {
    least = std::min(least, quota_of(folder, version1).value_or(least));
  });
  return least;
}

std::optional<MemoryRoom> memory_room(const std::string& root) {
  std::optional<MemoryRoom> room;
  if (const auto kib = number_after("MemAvailable:", root + "/proc/meminfo")) {
    room = MemoryRoom{static_cast<uint64_t>(*kib) * 1024, "MemAvailable in /proc/meminfo"};
  }
  for_each_cgroup(root, "memory", [&](const std::string& folder, bool version1) {
    const auto bytes = room_in(folder, version1);
    if (bytes && (!room || *bytes < room->bytes)) room = MemoryRoom{*bytes, "the limit of the cgroup " + folder};
  });
  return room;
}

}  // namespace ours
