#pragma once

#include <cstdint>
#include <utility>

namespace ours {

/// A file descriptor that belongs to this process alone: forked children close their copies as they begin. Else a
/// worker that a rank forked would keep the rank's connections open after the rank has died, and nobody would hear of
/// its death. Move-only. In a child, objects of the parent's refer to nothing.
class ProcessFd {
 public:
  ProcessFd() = default;
  /// Takes over `fd`; a negative one is none.
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
  uint64_t owner_ = 0;  ///< how many forks led to the process that has it
};

}  // namespace ours
