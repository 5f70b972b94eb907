#include "common/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include <algorithm>
#include <memory>
#include <optional>

namespace ours {

namespace {

/// Descriptors to leave for what the program itself opens.
constexpr size_t kSpare = 64;

/// The number of descriptors that this process has open; nothing if it cannot be found out, e.g. for want of one more.
std::optional<size_t> count_open() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (!folder) return std::nullopt;
  size_t count = 0;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): no other thread reads this stream.
  while (const dirent* entry = ::readdir(folder.get())) count += entry->d_name[0] == '.' ? 0 : 1;
  return count - 1;  // without the one that reads the folder
}

rlimit limit_of_descriptors() {
  rlimit limit{RLIM_INFINITY, RLIM_INFINITY};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  return limit;
}

std::string show(rlim_t limit) { return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit); }

}  // namespace

void want_descriptors(size_t more) noexcept {
  const rlimit limit = limit_of_descriptors();
  if (limit.rlim_cur == RLIM_INFINITY) return;
  const std::optional<size_t> open = count_open();
  if (!open || *open + more + kSpare > limit.rlim_cur) raise_descriptor_limit();
}

bool raise_descriptor_limit() noexcept {
  rlimit limit = limit_of_descriptors();
  if (limit.rlim_cur >= limit.rlim_max) return false;
  limit.rlim_cur = limit.rlim_max;
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

std::string describe_descriptors() {
  const rlimit limit = limit_of_descriptors();
  const std::optional<size_t> open = count_open();
  return "This process has " + (open ? std::to_string(*open) : "all of its") + " descriptors open; its limit is " +
         show(limit.rlim_cur) + ", which can be raised to " + show(limit.rlim_max) +
         ". Close files, or raise the hard limit of open files (`ulimit -Hn`, LimitNOFILE=, docker's --ulimit nofile=)";
}

}  // namespace ours
