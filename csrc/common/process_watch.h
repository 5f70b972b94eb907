#pragma once

#include <sys/types.h>

#include <memory>

#include "common/fd.h"

namespace ours {

/// Tells whether one process still runs. A process that ended but was not reaped yet (a zombie) counts as ended; one of
/// which nothing can be found out, for want of a descriptor, say, does not. All watches of a process share one
/// descriptor, however many groups it is in.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  explicit ProcessWatch(pid_t pid);

  bool ended() const;

 private:
  class Watched;

  std::shared_ptr<Watched> watched_;  // null: no process
};

}  // namespace ours
