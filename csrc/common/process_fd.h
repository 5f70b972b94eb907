#pragma once

#include <utility>

#include "common/owning_process.h"

namespace ours {

/// A file descriptor that forked children close as soon as they start. Otherwise a worker that a rank has forked would
/// keep the rank's connections open after its death, and the peers would not notice. Move-only. In a child, the
/// parent's objects refer to nothing.
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
