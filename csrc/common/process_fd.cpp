#include "common/process_fd.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

#include "common/process_wide.h"

namespace ours {

namespace {

/// All descriptors of ProcessFds. There is one list for the process, because fork() copies all of them.
struct Descriptors {
  std::vector<int> fds;

  void in_child() {
    for (const int fd : fds) ::close(fd);
    fds.clear();
  }
};

}  // namespace

ProcessFd::ProcessFd(int fd) : fd_(fd) {
  if (fd < 0) return;
  auto& all = ProcessWide<Descriptors>::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.value.fds.push_back(fd);
}

void ProcessFd::reset() {
  if (fd_ < 0) return;
  auto& all = ProcessWide<Descriptors>::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (owner_.is_here()) {
    auto& fds = all.value.fds;
    fds.erase(std::find(fds.begin(), fds.end(), fd_));
    ::close(fd_);
  }
  fd_ = -1;
}

}  // namespace ours
