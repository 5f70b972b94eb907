#include "common/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>

#include "common/error.h"

namespace ours {

std::shared_ptr<SharedMemory> SharedMemory::create(size_t bytes) {
  Fd fd(::memfd_create("ours", MFD_CLOEXEC));
  if (!fd.valid()) throw SystemError("cannot create shared memory (memfd_create)", errno);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    throw SystemError("cannot size shared memory to " + std::to_string(bytes) + " bytes (ftruncate)", errno);
  }
  // Owner only: the link in /proc is followed with the permissions of the file itself.
  if (::fchmod(fd.get(), 0600) != 0) throw SystemError("cannot protect shared memory (fchmod)", errno);
  return std::shared_ptr<SharedMemory>(new SharedMemory(std::move(fd), bytes));
}

std::shared_ptr<SharedMemory> SharedMemory::open(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd.valid()) throw SystemError("cannot open a peer's shared memory at " + path, errno);
  struct stat info{};
  if (::fstat(fd.get(), &info) != 0) throw SystemError("cannot inspect a peer's shared memory at " + path, errno);
  if (!S_ISREG(info.st_mode)) throw SystemError(path + " is no shared memory", EINVAL);
  return std::shared_ptr<SharedMemory>(new SharedMemory(std::move(fd), static_cast<size_t>(info.st_size)));
}

SharedMemory::SharedMemory(Fd fd, size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (address == MAP_FAILED)
    throw SystemError("cannot map " + std::to_string(bytes) + " bytes of shared memory", errno);
  data_ = static_cast<std::byte*>(address);
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

void SharedMemory::reserve(size_t offset, size_t bytes) {
  while (::fallocate(fd_.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno == EINTR) continue;
    throw SystemError("cannot reserve " + std::to_string(bytes) +
                          " bytes of shared memory; raise the job's memory limit or lower OURS_CHUNK_BYTES",
                      errno);
  }
}

}  // namespace ours
