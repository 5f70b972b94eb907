#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <functional>
#include <thread>

namespace ours::testing {

/// Returns whether `body` returns true in a forked process.
inline bool in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      ::_exit(body() ? 0 : 1);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s\n", e.what());
      ::_exit(1);
    }
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

/// Forks while another thread is in `call`, as a rule. Returns whether the child can call it, too.
template <class Call>
bool forked_meanwhile(Call call) {
  std::atomic<bool> begins{false};
  std::thread other([&] {
    begins = true;
    call();
  });
  while (!begins) {
  }
  const bool child_can = in_child([&] {
    ::alarm(5);  // ends a child that waits for a lock
    call();
    return true;
  });
  other.join();
  return child_can;
}

inline int open_null() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

/// Leaves this process only the descriptors 0 to 2, since groups of earlier tests that failed may have others, and
/// limits their number.
inline void limit_descriptors(rlim_t soft, rlim_t hard) {
  while (open_null() <= 2) {
  }
  for (int fd = 3; fd < 4096; ++fd) ::close(fd);
  const rlimit limit{soft, hard};
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

inline void use_up_descriptors() {
  while (open_null() >= 0) {
  }
}

}  // namespace ours::testing
