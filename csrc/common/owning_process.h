#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>

namespace ours {

/// Which process made an object: a forked child has a copy of everything, and must leave alone what is its parent's. To
/// ask costs no system call, as getpid() would.
class OwningProcess {
 public:
  /// The process that it is made in.
  OwningProcess() : forks_(forks()), pid_(::getpid()) {}

  /// False in a forked child of that process.
  bool is_here() const { return forks_ == forks(); }

  pid_t pid() const { return pid_; }

 private:
  /// How many forks led to this process since the first call.
  static uint64_t forks();

  uint64_t forks_;
  pid_t pid_;
};

}  // namespace ours
