#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>

#include "common/fd.h"

namespace ours {

/// Where another process finds the file of a heap: its descriptor in the process that has the heap, and what tells the
/// file from all others.
struct HeapPlace {
  uint64_t device;
  uint64_t inode;
  int32_t pid;
  int32_t fd;
};

/// A sparse memory file, and this process's mapping of all of it, which begins with a huge page. Pages take no memory
/// until they are reserved or touched.
class HeapFile {
 public:
  /// The size. This is address space, not memory.
#ifdef __SANITIZE_THREAD__
  // ThreadSanitizer leaves a program half a TiB of addresses, and with ranks as threads each maps the heaps of all.
  static constexpr size_t kBytes = size_t{1} << 32;
#else
  static constexpr size_t kBytes = size_t{1} << 36;
#endif

  /// Makes a new file. Throws SystemError if there is no address space for it.
  static HeapFile make();

  /// Maps the file of another process. Throws SystemError, or Error if it is not there.
  static HeapFile open(const HeapPlace& place);

  HeapFile(const HeapFile&) = delete;
  HeapFile& operator=(const HeapFile&) = delete;
  ~HeapFile();

  std::byte* data() const { return data_; }
  HeapPlace place() const;

  /// See reserve_memory().
  void reserve(uint64_t offset, size_t bytes) const;
  void give_back(uint64_t offset, size_t bytes) const noexcept;

  /// Calls map_privately() for [begin, end).
  bool map_own(uint64_t begin, uint64_t end) const noexcept;

 private:
  explicit HeapFile(Fd file);

  const Fd file_;
  std::byte* data_;
};

}  // namespace ours
