#pragma once

#include <cstddef>
#include <map>

namespace ours {

constexpr size_t kHugePage = size_t{2} << 20;

/// Whether the kernel has transparent huge pages and the administrator has not switched them off.
bool huge_pages_allowed();

/// Moves [data, data + bytes) onto huge pages, as far as whole huge pages fit into it; takes about a millisecond for
/// each MiB. Memory that cannot be moved stays where it is.
void move_to_huge_pages(void* data, size_t bytes);

/// Moves large buffers that are used repeatedly onto huge pages (Linux >= 6.1, MADV_COLLAPSE), unless the administrator
/// has switched them off. A gradient bucket of 25 MiB is 6,400 ordinary pages, which overflow the processor's TLB, and
/// its prefetchers stop at the end of each. The buffer takes no more memory and keeps its contents and addresses.
class HugePages {
 public:
  explicit HugePages(bool enabled);

  /// Counts a use of the buffer, and moves it at the third one. Ignores small buffers.
  void note_use(const void* data, size_t bytes);

  static constexpr size_t kLeastBytes = size_t{4} << 20;

 private:
  struct Seen {
    size_t bytes;
    int uses;
  };

  bool enabled_;
  std::map<const void*, Seen> seen_;  ///< by address; cleared when there are many
};

}  // namespace ours
