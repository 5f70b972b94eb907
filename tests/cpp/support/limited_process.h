#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <functional>

namespace ours::testing {

inline int open_null() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

/// Runs `body` in a process of its own, with its own limits and only the descriptors 0 to 2, because groups of
/// earlier tests that failed may have others. Returns whether `body` returned true.
inline bool in_child(const std::function<bool()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      while (open_null() <= 2) {
      }
      for (int fd = 3; fd < 4096; ++fd) ::close(fd);
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

inline void use_up_descriptors() {
  while (open_null() >= 0) {
  }
}

inline void limit_descriptors(rlim_t soft, rlim_t hard) {
  const rlimit limit{soft, hard};
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace ours::testing
