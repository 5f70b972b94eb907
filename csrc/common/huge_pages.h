#pragma once

#include <cstddef>
#include <map>

namespace ours {

constexpr size_t kHugePage = size_t{2} << 20;

/// Whether the system has huge pages, and its administrator has not switched them off.
bool huge_pages_allowed();

/// Moves the huge pages that lie wholly in [data, data + bytes) together, about a millisecond for each MiB. What cannot
/// be moved stays where it is.
void move_to_huge_pages(void* data, size_t bytes);

/// Moves large buffers that are used again and again onto huge pages (Linux >= 6.1, MADV_COLLAPSE). A gradient bucket
/// of 25 MiB is 6,400 ordinary pages: their addresses fill the processor's tables, and its prefetchers stop at the end
/// of each. Only pages that lie wholly in the buffer are touched, so that it takes no more memory; contents, addresses
/// and the buffer's owner stay what they are. Nothing happens where the administrator has switched huge pages off.
class HugePages {
 public:
  explicit HugePages(bool enabled);

  /// The buffer is used now. At its third time the pages are moved: once, in about a millisecond for each MiB.
  /// Errors are ignored: it is an ordinary buffer then.
  void saw(const void* data, size_t bytes);

  static constexpr size_t kLeastBytes = size_t{4} << 20;

 private:
  struct Seen {
    size_t bytes;
    int times;
  };

  bool enabled_;
  std::map<const void*, Seen> seen_;  ///< by address; forgotten when there are many
};

}  // namespace ours
