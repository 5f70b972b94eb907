#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

// Linux's number (since 5.14), for systems whose headers are older than their kernel.
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace ours {

/// The bytes of a page of memory.
inline size_t page_bytes() {
  static const auto kPage = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return kPage;
}

inline size_t whole_pages(size_t bytes) { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

}  // namespace ours
