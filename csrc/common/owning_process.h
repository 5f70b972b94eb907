#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>

namespace ours {

/// Remembers the process that made an object, since a forked child must not touch its copy of what belongs to its
/// parent. The check needs no system call, as getpid() would.
class OwningProcess {
 public:
  OwningProcess() : forks_(forks()), pid_(::getpid()) {}

  /// False in a forked child of the owner.
  bool is_here() const { return forks_ == forks(); }

  pid_t pid() const { return pid_; }

 private:
  /// The number of forks that led to this process since the library was loaded.
  static uint64_t forks();

  uint64_t forks_;
  pid_t pid_;
};

}  // namespace ours
