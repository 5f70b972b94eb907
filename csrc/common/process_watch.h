#pragma once

#include <sys/types.h>

#include <memory>

#include "common/fd.h"

namespace ours {

/// Tells whether a process is still running. A process that has ended but was not reaped yet (a zombie) counts as
/// ended. A process that cannot be observed, for instance for want of a descriptor, counts as running. All watches of a
/// process share one descriptor, however many groups it is in.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(pid_t pid);

  bool ended() const;

 private:
  class Watched;

  std::shared_ptr<Watched> watched_;  // null if it watches no process
};

}  // namespace ours
