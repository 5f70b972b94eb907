#pragma once

#include <utility>

#include "common/owning_process.h"

namespace ours {

/// A file descriptor that belongs to this process alone: forked children close their copies as soon as they start.
/// Otherwise, after a rank has died, a worker that it had forked would keep its connections open, and the peers would
/// not notice the death. Move-only. In a child, the parent's objects refer to nothing.
class ProcessFd {
 public:
  ProcessFd() = default;
  /// Takes ownership of `fd`; a negative number means none.
  explicit ProcessFd(int fd);
  ProcessFd(ProcessFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)), owner_(other.owner_) {}
  ProcessFd& operator=(ProcessFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      owner_ = other.owner_;
    }
    return *this;
  }
  ProcessFd(const ProcessFd&) = delete;
  ProcessFd& operator=(const ProcessFd&) = delete;
  ~ProcessFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
  OwningProcess owner_;
};

}  // namespace ours
