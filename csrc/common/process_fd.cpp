#include "common/process_fd.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace ours {

namespace {

/// All descriptors of ProcessFds. There is one list for the process, because fork() copies all of them. It is never
/// destroyed, because groups may outlive main().
struct Registry {
  std::mutex mutex;
  std::vector<int> fds;

  static Registry& get() {
    static Registry* const kRegistry = create();
    return *kRegistry;
  }

 private:
  static Registry* create() {
    auto* registry = new Registry;
    ::pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); },
                     [] {
                       Registry& all = get();
                       for (const int fd : all.fds) ::close(fd);
                       all.fds.clear();
                       all.mutex.unlock();
                     });
    return registry;
  }
};

}  // namespace

ProcessFd::ProcessFd(int fd) : fd_(fd) {
  if (fd < 0) return;
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.fds.push_back(fd);
}

void ProcessFd::reset() {
  if (fd_ < 0) return;
  Registry& all = Registry::get();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (owner_.is_here()) {
    all.fds.erase(std::find(all.fds.begin(), all.fds.end(), fd_));
    ::close(fd_);
  }
  fd_ = -1;
}

}  // namespace ours
