#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "common/error.h"
#include "common/fd.h"

namespace ours {

/// This system gives processes no memory that others can map (memfd_create is not allowed, or not known).
class MemoryRefused : public SystemError {
 public:
  using SystemError::SystemError;
};

/// A new memory file of `bytes` zeros, without a name in any file system, readable and writable by this user only.
/// `name` is for people who look into /proc. Throws MemoryRefused, or SystemError.
Fd make_memory_file(const char* name, size_t bytes);

/// Takes the memory of [offset, offset + bytes) of such a file now. In pieces, since a signal may interrupt each of
/// them and undo it: a timer of a profiler would let none end that takes longer than its period. Throws SystemError
/// where there is not enough; nothing is taken then.
void reserve_memory(int fd, size_t offset, size_t bytes);

/// The same by calls of `take(offset, bytes)`, which returns 0 or sets errno as fallocate() does. Returns the error, or
/// 0.
int reserve_in_pieces(size_t offset, size_t bytes, const std::function<int(size_t, size_t)>& take);

/// A mapping of an unnamed memory file (memfd). It has no name in any file system: it vanishes with its last user,
/// however that ends, and the size of /dev/shm does not matter. Pages cost nothing until they are reserved or touched.
class SharedMemory {
 public:
  /// A new file of `bytes` zeros, readable and writable by this user only. Throws MemoryRefused, or SystemError.
  static std::shared_ptr<SharedMemory> create(size_t bytes);

  /// Memory of the same kind that nobody else can open, without a file: for a rank that shares it with nobody.
  static std::shared_ptr<SharedMemory> create_alone(size_t bytes);

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

  Fd fd_;  // invalid: it has no file
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace ours
