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

/// Returns whether `call` succeeds in a child that is forked while another thread makes the process's first such call.
/// Not every fork comes at the moment that matters, so 50 processes try it.
inline bool can_fork_during(const std::function<bool()>& call) {
  const auto in_grandchild = [&] {
    ::alarm(5);  // ends a process that waits for a lock
    return call();
  };
  const auto in_one_child = [&] {
    ::alarm(10);
    std::atomic<bool> begun{false};
    std::thread other([&] {
      begun = true;
      call();
    });
    while (!begun) {
    }
    const bool possible = in_child(in_grandchild);
    other.join();
    return possible;
  };
  for (int i = 0; i < 50; ++i) {
    if (!in_child(in_one_child)) return false;
  }
  return true;
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
