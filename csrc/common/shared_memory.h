#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "common/fd.h"

namespace ours {

/// A mapping of an unnamed memory file (memfd). It has no name in any file system: it vanishes with its last user,
/// however that ends, and the size of /dev/shm does not matter. Pages cost nothing until they are reserved or touched.
class SharedMemory {
 public:
  /// A new file of `bytes` zeros, readable and writable by this user only.
  static std::shared_ptr<SharedMemory> create(size_t bytes);

  /// The file that `path` (of the form /proc/PID/fd/N) leads to. Throws SystemError where it cannot be opened.
  static std::shared_ptr<SharedMemory> open(const std::string& path);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

  /// Takes the memory of [offset, offset + bytes) now, so that a later access cannot die of SIGBUS. Throws SystemError
  /// where there is not enough.
  void reserve(size_t offset, size_t bytes);

 private:
  SharedMemory(Fd fd, size_t bytes);

  Fd fd_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ours
