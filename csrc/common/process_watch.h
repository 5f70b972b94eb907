#pragma once

#include <sys/types.h>

#include "common/fd.h"

namespace ours {

/// Tells whether one process still runs. A process that ended but was not reaped yet (a zombie) counts as ended.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(pid_t pid);

  bool ended() const;

 private:
  pid_t pid_ = 0;
  Fd pidfd_;  // invalid where the kernel has no pidfd_open; then /proc is read
  bool ended_at_start_ = false;
};

}  // namespace ours
