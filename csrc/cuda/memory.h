#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>

#include "cuda/driver.h"
#include "device/device.h"

// CUDA memory. All of this must be called with the device's context.

namespace ours::cuda {

/// Pinned memory of the host, zeroed.
std::shared_ptr<void> pinned_block(size_t bytes, CUcontext context);

/// Memory of one device, in units that CUDA does not share among allocations, since other processes map whole units.
class OwnMemory : public std::enable_shared_from_this<OwnMemory> {
 public:
  explicit OwnMemory(CUcontext context) : context_(context) {}

  std::shared_ptr<void> make(size_t bytes);
  /// Whether this is the beginning of memory that make() returned and that still exists.
  bool is_beginning(const void* memory);

 private:
  const CUcontext context_;
  std::mutex mutex_;
  std::set<const void*> all_;  // guarded by mutex_
};

/// What another process needs to map `memory`, which must be the beginning of memory of this process.
MemoryHandle share_block(const void* memory);
std::shared_ptr<void> map_block(const MemoryHandle& handle, CUcontext context);

}  // namespace ours::cuda
