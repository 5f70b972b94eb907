#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>

#include "cuda/driver.h"
#include "device/device.h"

namespace ours::cuda {

/// Memory that is kept when it is dropped, for the next who asks: both to get it from CUDA and to give it back may wait
/// for all of the device's work, also for what waits for us.
class Blocks : public std::enable_shared_from_this<Blocks> {
 public:
  virtual ~Blocks() = default;

  std::shared_ptr<void> take(size_t bytes);
  /// Whether this is the beginning of memory that is in use, and how much it is; 0 if not.
  size_t bytes_at(const void* memory);

 protected:
  explicit Blocks(size_t unit) : unit_(unit) {}
  /// Null where there is no more.
  virtual void* allocate(size_t bytes) = 0;
  virtual void give_back(void* memory) noexcept = 0;

 private:
  void* take_kept(size_t bytes);
  void* take_new(size_t bytes);
  void keep(void* memory) noexcept;

  size_t unit_;
  std::mutex mutex_;
  std::multimap<size_t, void*> kept_;
  std::map<const void*, size_t> used_;
};

/// Pinned memory of the host. What comes from take() has to be cleared.
class PinnedBlocks : public Blocks {
 public:
  PinnedBlocks() : Blocks(4096) {}

 protected:
  void* allocate(size_t bytes) override;
  void give_back(void* memory) noexcept override;
};

/// A device's memory, in units that CUDA does not share among allocations: other processes map whole units.
class DeviceBlocks : public Blocks {
 public:
  DeviceBlocks() : Blocks(size_t{2} << 20) {}

 protected:
  void* allocate(size_t bytes) override;
  void give_back(void* memory) noexcept override;
};

/// What tells this process's memory from that of others.
using ProcessToken = std::array<unsigned char, 16>;

/// What travels in a MemoryHandle.
struct SharedBlock {
  cudaIpcMemHandle_t ipc;
  ProcessToken process;
  const void* address;  ///< in the process that shared it
  size_t bytes;
};
static_assert(sizeof(SharedBlock) <= sizeof(MemoryHandle), "it has to fit");

/// Both to be called with the device's context.
MemoryHandle share_block(const void* memory, size_t bytes);
std::shared_ptr<void> map_block(const MemoryHandle& handle, CUcontext context);

}  // namespace ours::cuda
