#pragma once

#include <cerrno>
#include <cstddef>
#include <string>

namespace ours {

/// Makes room for `more` descriptors: if the soft limit of open files (RLIMIT_NOFILE) leaves less, raises it to the
/// hard limit. If that does not suffice, opening a descriptor fails later, and reports it.
void want_descriptors(size_t more) noexcept;

/// Raises the soft limit of open files to the hard one. Returns false if it was as high already.
bool raise_descriptor_limit() noexcept;

/// How many descriptors this process has open, how many it may have, and how to raise that, in whole sentences.
std::string describe_descriptors();

/// Whether `error` means that there are too many descriptors, in this process or on the machine.
inline bool is_lack_of_descriptors(int error) { return error == EMFILE || error == ENFILE; }

/// Calls `open`, which returns a new descriptor, or -1 and sets errno. If the process has too many descriptors, raises
/// the limit and calls it again.
template <class Open>
int with_descriptors(Open&& open) {
  const int fd = open();
  if (fd >= 0 || errno != EMFILE) return fd;
  if (raise_descriptor_limit()) return open();
  errno = EMFILE;
  return fd;
}

}  // namespace ours
