#include "common/fork_guard.h"

#include <pthread.h>
#include <sys/mman.h>

namespace ours {

ForkGuard& ForkGuard::instance() {
  static ForkGuard* const kGuard = [] {
    auto* const made = new ForkGuard;  // never freed: memory and forks may come as late as exit
    ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] { instance().in_child(); });
    return made;
  }();
  return *kGuard;
}

void ForkGuard::add(SharedWithOthers& memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.insert(&memory);
}

void ForkGuard::remove(SharedWithOthers& memory) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_.erase(&memory);
}

void ForkGuard::in_child() {
  for (SharedWithOthers* memory : all_) memory->keep_to_oneself();
  mutex_.unlock();
}

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
