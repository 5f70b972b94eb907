#include "common/fork_guard.h"

#include <sys/mman.h>

#include <set>

#include "common/process_wide.h"

namespace ours {

namespace {

struct SharedMemories {
  std::set<SharedWithOthers*> all;

  void in_child() {
    for (SharedWithOthers* memory : all) memory->keep_to_oneself();
  }
};

}  // namespace

void ForkGuard::add(SharedWithOthers& memory) {
  const std::lock_guard<std::mutex> lock(no_forks());
  ProcessWide<SharedMemories>::get().value.all.insert(&memory);
}

void ForkGuard::remove(SharedWithOthers& memory) {
  const std::lock_guard<std::mutex> lock(no_forks());
  ProcessWide<SharedMemories>::get().value.all.erase(&memory);
}

std::mutex& ForkGuard::no_forks() { return ProcessWide<SharedMemories>::get().mutex; }

bool map_privately(std::byte* place, size_t bytes, int fd, off_t offset) noexcept {
  // Mapped elsewhere first: a system that does not promise that much memory would refuse only after the old map is
  // gone.
  void* const copy = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, fd, offset);
  if (copy == MAP_FAILED) return false;
  if (::mremap(copy, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) != MAP_FAILED) return true;
  ::munmap(copy, bytes);
  return false;
}

}  // namespace ours
