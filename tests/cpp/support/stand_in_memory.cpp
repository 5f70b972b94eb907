#include "support/stand_in_memory.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "common/shared_memory.h"

namespace ours::testing {
namespace {

/// Only this many bytes are filled; the rest takes no pages of the host until it is used.
constexpr size_t kMostFilled = size_t{1} << 20;

struct Shared {
  pid_t pid;
  int fd;
  void* address;
};
static_assert(sizeof(Shared) <= sizeof(MemoryHandle), "it has to fit");

/// The place of each piece of memory that this process can share. Never destroyed: memory may be dropped at the very
/// end.
struct Registry {
  std::mutex mutex;
  std::map<const void*, const SharedMemory*> all;
};

Registry& registry() {
  static auto* const kRegistry = new Registry;
  return *kRegistry;
}

std::shared_ptr<void> pointer_into(std::shared_ptr<SharedMemory> memory) {
  void* const data = memory->data();
  return {data, [memory = std::move(memory)](void* address) {
            const std::lock_guard<std::mutex> lock(registry().mutex);
            registry().all.erase(address);
          }};
}

}  // namespace

std::shared_ptr<void> stand_in_memory(size_t bytes, unsigned char fill) {
  auto memory = SharedMemory::create(bytes == 0 ? 1 : bytes);
  if (fill != 0) std::memset(memory->data(), fill, std::min(memory->bytes(), kMostFilled));
  {
    const std::lock_guard<std::mutex> lock(registry().mutex);
    registry().all[memory->data()] = memory.get();
  }
  return pointer_into(std::move(memory));
}

MemoryHandle share_stand_in_memory(const void* memory) {
  const std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().all.find(memory);
  if (found == registry().all.end()) throw DeviceError("share: this is not the beginning of memory of the device");
  const Shared shared{::getpid(), found->second->fd(), found->second->data()};
  MemoryHandle handle{};
  std::memcpy(handle.data(), &shared, sizeof(shared));
  return handle;
}

std::shared_ptr<void> map_stand_in_memory(const MemoryHandle& handle) {
  Shared shared{};
  std::memcpy(&shared, handle.data(), sizeof(shared));
  if (shared.pid == ::getpid()) return {shared.address, [](void*) {}};
  try {
    return pointer_into(SharedMemory::open("/proc/" + std::to_string(shared.pid) + "/fd/" + std::to_string(shared.fd)));
  } catch (const SystemError& e) {
    throw DeviceError(std::string("map: ") + e.what());
  }
}

}  // namespace ours::testing
