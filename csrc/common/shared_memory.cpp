#include "common/shared_memory.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/descriptors.h"
#include "common/pages.h"

namespace ours {

namespace {

// In Linux since 6.3; older headers lack it.
constexpr unsigned kNoExecSeal = 0x0008;

/// Small enough for the slowest machine to reserve between two ticks of a profiler's timer.
constexpr size_t kLeastPiece = size_t{64} << 10;
constexpr size_t kMostPiece = size_t{16} << 20;

int new_memory_file(const char* name) {
  // If the administrator insists (vm.memfd_noexec=2), the file has to declare that it holds no programs.
  const int fd = with_descriptors([&] { return ::memfd_create(name, MFD_CLOEXEC | kNoExecSeal); });
  if (fd >= 0 || errno != EINVAL) return fd;
  return with_descriptors([&] { return ::memfd_create(name, MFD_CLOEXEC); });
}

[[noreturn]] void refuse(size_t bytes, int error) {
  throw SystemError("cannot reserve " + std::to_string(bytes) + " bytes of shared memory; raise the job's memory limit",
                    error);
}

}  // namespace

Fd make_memory_file(const char* name, size_t bytes) {
  Fd fd(new_memory_file(name));
  if (!fd.valid()) {
    const bool refused = errno == EPERM || errno == EACCES || errno == ENOSYS;
    const char* const what = "cannot create shared memory (memfd_create)";
    if (refused) throw MemoryRefused(what, errno);
    throw SystemError(what, errno);
  }
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw SystemError("cannot size shared memory to " + std::to_string(bytes) + " bytes (ftruncate)", errno);
  }
  // For the owner only: the link in /proc is opened with the permissions of the file itself.
  if (::fchmod(fd.get(), 0600) != 0) throw SystemError("cannot protect shared memory (fchmod)", errno);
  return fd;
}

std::string descriptor_path(pid_t pid, int fd) { return "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd); }

Fd open_memory_file(const std::string& path) {
  Fd fd(with_descriptors([&] { return ::open(path.c_str(), O_RDWR | O_CLOEXEC); }));
  if (!fd.valid()) throw SystemError("cannot open a peer's shared memory at " + path, errno);
  return fd;
}

int reserve_in_pieces(size_t offset, size_t bytes, const std::function<int(size_t, size_t)>& take) {
  size_t piece = kMostPiece;
  for (size_t done = 0; done < bytes;) {
    const size_t next = std::min(piece, bytes - done);
    if (take(offset + done, next) == 0) {
      done += next;
    } else if (errno == EINTR) {
      piece = std::max(piece / 2, kLeastPiece);
    } else {
      return errno;
    }
  }
  return 0;
}

void reserve_memory(int fd, size_t offset, size_t bytes) {
  const int error = reserve_in_pieces(offset, bytes, [fd](size_t at, size_t count) {
    return ::fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(count));
  });
  if (error == 0) return;
  ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  refuse(bytes, error);
}

std::shared_ptr<SharedMemory> SharedMemory::create(size_t bytes) {
  return std::shared_ptr<SharedMemory>(new SharedMemory(make_memory_file("ours", bytes), bytes));
}

std::shared_ptr<SharedMemory> SharedMemory::create_alone(size_t bytes) {
  return std::shared_ptr<SharedMemory>(new SharedMemory(Fd(), bytes));
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& path) {
  Fd fd = open_memory_file(path);
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) throw SystemError("cannot inspect a peer's shared memory at " + path, errno);
  if (!S_ISREG(info.st_mode)) throw SystemError(path + " is no shared memory", EINVAL);
  return std::shared_ptr<SharedMemory>(new SharedMemory(std::move(fd), static_cast<size_t>(info.st_size)));
}

SharedMemory::SharedMemory(Fd fd, size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  const int flags = MAP_SHARED | (fd_.valid() ? 0 : MAP_ANONYMOUS | MAP_NORESERVE);
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, fd_.get(), 0);
  if (address == MAP_FAILED)
    throw SystemError("cannot map " + std::to_string(bytes) + " bytes of shared memory", errno);
  data_ = static_cast<std::byte*>(address);
}

SharedMemory::~SharedMemory() { ::munmap(data_, bytes_); }

void SharedMemory::close_file() noexcept {
  if (::madvise(data_, page_bytes(), MADV_POPULATE_WRITE) == 0) fd_ = Fd();
}

size_t SharedMemory::taken() const {
  constexpr size_t kAtOnce = 4096;
  std::array<unsigned char, kAtOnce> present{};
  size_t pages = 0;
  for (size_t at = 0; at < bytes_; at += kAtOnce * page_bytes()) {
    const size_t part = std::min(bytes_ - at, kAtOnce * page_bytes());
    if (::mincore(data_ + at, part, present.data()) != 0) break;
    const auto end = present.begin() + static_cast<ptrdiff_t>((part + page_bytes() - 1) / page_bytes());
    pages +=
        static_cast<size_t>(std::count_if(present.begin(), end, [](unsigned char page) { return (page & 1) != 0; }));
  }
  return pages * page_bytes();
}

void SharedMemory::reserve(size_t offset, size_t bytes) {
  const size_t begin = offset / page_bytes() * page_bytes();
  const int error = reserve_in_pieces(begin, offset + bytes - begin, [this](size_t at, size_t count) {
    return ::madvise(data_ + at, count, MADV_POPULATE_WRITE);
  });
  if (error == EINVAL) {
    // An old system. Only memory that never had a file has none there, and nobody shares it.
    if (fd_.valid()) reserve_memory(fd_.get(), offset, bytes);
  } else if (error != 0) {
    refuse(bytes, error);
  }
}

}  // namespace ours
