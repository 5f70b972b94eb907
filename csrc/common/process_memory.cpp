#include "common/process_memory.h"

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
  ReadableByOthers readable;
  readable.add(data, bytes);
  return readable.all();
}

void ReadableByOthers::add(const void* data, size_t bytes) noexcept {
  if (bytes == 0) return;
  auto* const first = static_cast<std::byte*>(const_cast<void*>(data));
  places_[number_++] = {first, 1};
  places_[number_++] = {first + bytes - 1, 1};
  if (number_ == places_.size()) look();
}

bool ReadableByOthers::all() noexcept {
  if (number_ != 0) look();
  return all_;
}

void ReadableByOthers::look() noexcept {
  std::array<std::byte, std::tuple_size_v<decltype(places_)>> bytes{};
  const iovec here{bytes.data(), number_};
  const ssize_t read = ::process_vm_readv(::getpid(), &here, 1, places_.data(), number_, 0);
  all_ = all_ && read == static_cast<ssize_t>(number_);
  number_ = 0;
}

}  // namespace ours
