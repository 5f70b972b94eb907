#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

namespace ours {

/// Copies bytes at the address `from` of another process to `to` (process_vm_readv(2)), without that process's help.
/// Returns 0, or the errno that says why not all of them are here: EPERM where the system allows it to debuggers only,
/// ESRCH if the process has ended.
int read_process_memory(pid_t pid, void* to, uint64_t from, size_t bytes) noexcept;

/// Whether other processes that may read this one's memory can read those bytes. They cannot read what a driver has
/// mapped.
bool is_readable_by_others(const void* data, size_t bytes) noexcept;

/// The same of memory in several places, with few system calls.
class ReadableByOthers {
 public:
  void add(const void* data, size_t bytes) noexcept;
  /// Whether all that was added can be read.
  bool all() noexcept;

 private:
  void look() noexcept;

  std::array<iovec, 128> places_;  ///< the first and last bytes that have not been looked at
  size_t number_ = 0;
  bool all_ = true;
};

}  // namespace ours
