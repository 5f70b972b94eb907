#include "common/process_memory.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

namespace ours {

int read_process_memory(pid_t pid, void* to, uint64_t from, size_t bytes) noexcept {
  auto* next = static_cast<std::byte*>(to);
  while (bytes > 0) {
    const iovec here{next, bytes};
    // NOLINTNEXTLINE(performance-no-int-to-ptr): it is an address of that process.
    const iovec there{reinterpret_cast<void*>(from), bytes};
    const ssize_t n = ::process_vm_readv(pid, &here, 1, &there, 1, 0);
    if (n < 0) return errno;
    if (n == 0) return EFAULT;
    next += n;
    from += static_cast<size_t>(n);
    bytes -= static_cast<size_t>(n);
  }
  return 0;
}

bool is_readable_by_others(const void* data, size_t bytes) noexcept {
  if (bytes == 0) return true;
  const auto first = reinterpret_cast<uint64_t>(data);
  std::byte byte{};
  const auto reads = [&](uint64_t at) { return read_process_memory(::getpid(), &byte, at, 1) == 0; };
  return reads(first) && reads(first + bytes - 1);
}

}  // namespace ours
