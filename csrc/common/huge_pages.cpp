#include "common/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <fstream>
#include <string>

// Linux's number, for systems whose headers are older than their kernel.
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

namespace ours {

namespace {

constexpr size_t kMostBuffers = 256;
constexpr int kUsesBeforeMove = 3;

}  // namespace

bool huge_pages_allowed() {
  // The kernel puts brackets around the setting in force: "always [madvise] never". MADV_COLLAPSE would ignore it.
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string line;
  return std::getline(file, line) && line.find("[never]") == std::string::npos;
}

void move_to_huge_pages(void* data, size_t bytes) {
  const size_t to_first = (kHugePage - reinterpret_cast<uintptr_t>(data) % kHugePage) % kHugePage;
  if (bytes < to_first + kHugePage) return;
  (void)::madvise(static_cast<char*>(data) + to_first, (bytes - to_first) / kHugePage * kHugePage, MADV_COLLAPSE);
}

HugePages::HugePages(bool enabled) : enabled_(enabled && huge_pages_allowed()) {}

void HugePages::note_use(const void* data, size_t bytes) {
  if (!enabled_ || bytes < kLeastBytes) return;
  const auto found = seen_.find(data);
  if (found == seen_.end() || found->second.bytes != bytes) {
    if (seen_.size() >= kMostBuffers) seen_.clear();
    seen_[data] = Seen{bytes, 1};
    return;
  }
  if (++found->second.uses == kUsesBeforeMove) move_to_huge_pages(const_cast<void*>(data), bytes);
}

}  // namespace ours
