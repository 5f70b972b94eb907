#pragma once

#include <cerrno>
#include <cstddef>
#include <string>

namespace ours {

/// Makes room for `more` descriptors beside those that are open: raises the soft limit of open files (RLIMIT_NOFILE) to
/// the hard one where it leaves less. What fails all the same says so when it does.
void want_descriptors(size_t more) noexcept;

/// Raises the soft limit of open files to the hard one. False where it is there already.
bool raise_descriptor_limit() noexcept;

/// How many descriptors this process has open, how many it may have, and how to raise that: whole sentences.
std::string describe_descriptors();

/// Whether `error` means that there are too many descriptors, in this process or on the machine.
inline bool is_lack_of_descriptors(int error) { return error == EMFILE || error == ENFILE; }

/// What `open`, which returns a new descriptor or -1 and sets errno, returns. Where the process has too many it is
/// called again with a higher limit.
template <class Open>
int with_descriptors(Open&& open) {
  const int fd = open();
  if (fd >= 0 || errno != EMFILE) return fd;
  if (raise_descriptor_limit()) return open();
  errno = EMFILE;
  return fd;
}

}  // namespace ours
