#pragma once

#include <sys/types.h>

#include <cstddef>
#include <mutex>

namespace ours {

/// Memory that other processes share: what a forked child writes there must not reach them.
class SharedWithOthers {
 public:
  /// Runs in the child of a fork, in which only system calls are allowed: gives the child a copy of its own.
  virtual void keep_to_oneself() noexcept = 0;

 protected:
  ~SharedWithOthers() = default;
};

/// All memory of this process that other processes share.
class ForkGuard {
 public:
  static void add(SharedWithOthers& memory);
  /// Called before the memory is unmapped.
  static void remove(SharedWithOthers& memory);

  /// No thread forks while it is held, so a child never finds what it guards half changed.
  static std::mutex& no_forks();
};

/// Maps the file at `place` anew, where it is mapped already: what this process writes there from now on is private.
/// Other threads may use the memory meanwhile. Returns false if the system refuses. Makes only system calls.
bool map_privately(std::byte* place, size_t bytes, int fd, off_t offset) noexcept;

}  // namespace ours
