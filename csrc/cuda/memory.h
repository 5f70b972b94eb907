#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <set>

#include "cuda/driver.h"
#include "device/device.h"

// Memory of CUDA's. All of this is to be called with the device's context.

namespace ours::cuda {

/// Pinned memory of the host, all zero.
std::shared_ptr<void> make_pinned(size_t bytes, CUcontext context);

/// Memory of one device, in units that CUDA does not share among allocations, since other processes map whole units.
class OwnMemory : public std::enable_shared_from_this<OwnMemory> {
 public:
  explicit OwnMemory(CUcontext context) : context_(context) {}

  std::shared_ptr<void> make(size_t bytes);
  /// Whether this is the beginning of what make() returned, and is still there.
  bool is_beginning(const void* memory);

 private:
  const CUcontext context_;
  std::mutex mutex_;
  std::set<const void*> all_;  // guarded by mutex_
};

/// What another process needs to map `memory`, the beginning of memory of this one.
MemoryHandle share_block(const void* memory);
std::shared_ptr<void> map_block(const MemoryHandle& handle, CUcontext context);

}  // namespace ours::cuda
