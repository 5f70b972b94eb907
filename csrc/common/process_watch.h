#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>

#include "common/fd.h"

namespace ours {

/// When a process began, in the kernel's ticks, or 0 if that cannot be found. It tells two processes apart that have
/// the same number, one after the other.
uint64_t start_of(pid_t pid);

/// Tells whether a process is still running. A process that has ended but was not reaped yet (a zombie) counts as
/// ended. A process that cannot be observed, for instance for want of a descriptor, counts as running. All watches of a
/// process share one descriptor, however many groups it is in.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  /// `start`: what start_of() said of the process. If it is 0, a process that has taken the number since then is
  /// watched in its place.
  explicit ProcessWatch(pid_t pid, uint64_t start = 0);

  bool ended() const;

 private:
  class Watched;

  std::shared_ptr<Watched> watched_;  // null if it watches no process
  bool replaced_ = false;             // by another process with its number
};

}  // namespace ours
