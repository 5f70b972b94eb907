#include "transport/node/heap_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "common/error.h"
#include "common/fork_guard.h"
#include "common/huge_pages.h"
#include "common/shared_memory.h"

namespace ours {

namespace {

[[noreturn]] void throw_no_room(int error) {
  throw SystemError("cannot map a rank's shared memory (is `ulimit -v` set?)", error);
}

/// Takes addresses for a heap, which begin with a huge page, as its file does.
std::byte* take_room() {
  constexpr size_t kRoom = HeapFile::kBytes + kHugePage;
  void* const taken = ::mmap(nullptr, kRoom, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) throw_no_room(errno);
  auto* const room = static_cast<std::byte*>(taken);
  const size_t before = (kHugePage - reinterpret_cast<uintptr_t>(room) % kHugePage) % kHugePage;
  if (before > 0) ::munmap(room, before);
  ::munmap(room + before + HeapFile::kBytes, kHugePage - before);
  return room + before;
}

}  // namespace

HeapFile HeapFile::make() { return HeapFile(make_memory_file("ours_heap", kBytes)); }

HeapFile HeapFile::open(const HeapPlace& place) {
  Fd file = open_memory_file(descriptor_path(place.pid, place.fd));
  struct stat info{};
  const bool found = ::fstat(file.get(), &info) == 0 && info.st_dev == place.device && info.st_ino == place.inode;
  if (!found) throw Error("process " + std::to_string(place.pid) + " has no heap where it said");
  return HeapFile(std::move(file));
}

HeapFile::HeapFile(Fd file) : file_(std::move(file)), data_(take_room()) {
  constexpr int kFlags = MAP_SHARED | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(data_, kBytes, PROT_READ | PROT_WRITE, kFlags, file_.get(), 0) == MAP_FAILED) {
    const int error = errno;
    ::munmap(data_, kBytes);
    throw_no_room(error);
  }
  // A core dump would read every page, and reading it allocates its memory.
  ::madvise(data_, kBytes, MADV_DONTDUMP);
}

HeapFile::~HeapFile() { ::munmap(data_, kBytes); }

HeapPlace HeapFile::place() const {
  struct stat info{};
  ::fstat(file_.get(), &info);
  return {info.st_dev, info.st_ino, ::getpid(), file_.get()};
}

void HeapFile::reserve(uint64_t offset, size_t bytes) const { reserve_memory(file_.get(), offset, bytes); }

void HeapFile::give_back(uint64_t offset, size_t bytes) const noexcept {
  ::fallocate(file_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
              static_cast<off_t>(bytes));
}

bool HeapFile::map_own(uint64_t begin, uint64_t end) const noexcept {
  return map_privately(data_ + begin, end - begin, file_.get(), static_cast<off_t>(begin));
}

}  // namespace ours
