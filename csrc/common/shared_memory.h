#pragma once

#include <sys/types.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "common/error.h"
#include "common/fd.h"

namespace ours {

/// This system gives processes no memory that others can map (memfd_create is forbidden or unknown).
class MemoryRefused : public SystemError {
 public:
  using SystemError::SystemError;
};

/// Makes a memory file of `bytes` zeros, without a name in any file system, which only this user can read and write.
/// `name` is for people who look into /proc. Throws MemoryRefused or SystemError.
Fd make_memory_file(const char* name, size_t bytes);

/// Where a process finds a descriptor of another process, as far as the system lets it.
std::string descriptor_path(pid_t pid, int fd);

/// Opens another process's memory file at `path` (see descriptor_path()). Throws SystemError.
Fd open_memory_file(const std::string& path);

/// Allocates [offset, offset + bytes) of such a file now. If there is not enough memory, frees the whole range,
/// contents included, and throws SystemError.
void reserve_memory(int fd, size_t offset, size_t bytes);

/// Does that by calls of `take(offset, bytes)`, which returns 0, or sets errno like fallocate(). Returns 0 or the
/// errno. It takes small pieces, since a signal interrupts and undoes each: with a profiler's timer, a piece that takes
/// longer than the timer's period would never succeed.
int reserve_in_pieces(size_t offset, size_t bytes, const std::function<int(size_t, size_t)>& take);

/// A mapping of an unnamed memory file (memfd). It vanishes with its last user, however that one ends, and is
/// independent of the size of /dev/shm. Pages cost nothing until they are reserved or touched.
class SharedMemory {
 public:
  /// A new file of `bytes` zeros, which only this user can read and write. Throws MemoryRefused or SystemError.
  static std::shared_ptr<SharedMemory> create(size_t bytes);

  /// Memory of the same kind without a file, for a rank that shares it with no other.
  static std::shared_ptr<SharedMemory> create_alone(size_t bytes);

  /// Maps the file at `path` (see descriptor_path()). Throws SystemError if it cannot be opened.
  static std::shared_ptr<SharedMemory> open(const std::string& path);

  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;
  ~SharedMemory();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_.get(); }

  /// Called once all who share the memory have mapped it, which costs them no descriptor from then on. The file stays
  /// open where the system reserves memory only by its file (before Linux 5.14).
  void close_file() noexcept;

  /// How many of the bytes are in memory, whoever has reserved or touched them.
  size_t taken() const;

  /// Allocates [offset, offset + bytes) now, so that a later access cannot raise SIGBUS. Throws SystemError if there is
  /// not enough memory.
  void reserve(size_t offset, size_t bytes);

 private:
  SharedMemory(Fd fd, size_t bytes);

  Fd fd_;  // invalid if it has no file, or needs it no more
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ours
