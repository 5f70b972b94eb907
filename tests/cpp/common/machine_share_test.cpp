#include "common/machine_share.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>

#include "support/testing.h"

// What cgroups leave a process, read from files of the tests' own.

namespace ours::testing {
namespace {

/// A folder that plays the root of a system, with these files.
class Root {
 public:
  explicit Root(const std::map<std::string, std::string>& files) {
    char name[] = "/tmp/ours-root-XXXXXX";
    if (::mkdtemp(name) == nullptr) throw Failure("cannot make a folder");
    path_ = name;
    for (const auto& [file, text] : files) {
      const std::filesystem::path path = path_ + file;
      std::filesystem::create_directories(path.parent_path());
      std::ofstream(path) << text;
    }
  }
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;
  ~Root() { std::filesystem::remove_all(path_); }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(the_least_quota_on_the_way_up_counts_in_version_2) {
  const Root root({{"/proc/self/cgroup", "0::/job/step\n"},
                   {"/sys/fs/cgroup/job/step/cpu.max", "800000 100000\n"},
                   {"/sys/fs/cgroup/job/cpu.max", "400000 100000\n"}});
  CHECK_EQ(cpu_quota(root.path()), 4.0);
}

TEST(no_quota_is_infinite) {
  const Root root({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "max 100000\n"}});
  CHECK(std::isinf(cpu_quota(root.path())));
  CHECK(std::isinf(cpu_quota(root.path() + "/nothing")));
}

TEST(quotas_of_version_1_are_those_of_the_controller_of_cpus) {
  const Root root({{"/proc/self/cgroup", "5:memory:/m\n4:cpu,cpuacct:/job\n0::/\n"},
                   {"/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us", "150000\n"},
                   {"/sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us", "100000\n"},
                   {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"},
                   {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"}});
  CHECK_EQ(cpu_quota(root.path()), 1.5);
}

TEST(in_a_container_the_topmost_folder_is_the_processs_own) {
  const Root root({{"/proc/self/cgroup", "4:cpu:/docker/4711\n3:memory:/docker/4711\n"},
                   {"/proc/meminfo", "MemTotal: 999 kB\nMemAvailable:   8000 kB\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n"},
                   {"/sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"},
                   {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "5000000\n"},
                   {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "4000000\n"},
                   {"/sys/fs/cgroup/memory/memory.stat", "cache 9\ntotal_inactive_file 500000\n"}});
  CHECK_EQ(cpu_quota(root.path()), 2.0);
  const auto room = memory_room(root.path());
  CHECK(room.has_value());
  CHECK_EQ(room->bytes, 1'500'000u);
  CHECK_CONTAINS(room->source, "/sys/fs/cgroup/memory");
}

TEST(the_least_room_for_memory_counts) {
  const Root root({{"/proc/self/cgroup", "0::/job\n"},
                   {"/proc/meminfo", "MemTotal: 9999 kB\nMemAvailable: 2000 kB\n"},
                   {"/sys/fs/cgroup/job/memory.max", "max\n"},
                   {"/sys/fs/cgroup/job/memory.current", "1000\n"},
                   {"/sys/fs/cgroup/memory.max", "4000000\n"},
                   {"/sys/fs/cgroup/memory.current", "1000\n"}});
  const auto room = memory_room(root.path());
  CHECK(room.has_value());
  CHECK_EQ(room->bytes, 2000u * 1024);
  CHECK_CONTAINS(room->source, "MemAvailable");
  CHECK(!memory_room(root.path() + "/nothing").has_value());
}

TEST(a_cgroup_over_its_limit_has_no_room) {
  const Root root({{"/proc/self/cgroup", "0::/\n"},
                   {"/sys/fs/cgroup/memory.max", "1000\n"},
                   {"/sys/fs/cgroup/memory.current", "5000\n"}});
  CHECK_EQ(memory_room(root.path())->bytes, 0u);
}

}  // namespace
}  // namespace ours::testing
