#pragma once

#include <cstddef>
#include <memory>

#include "cuda/driver.h"
#include "device/device.h"

// CUDA memory. All of this must be called with the device's context.

namespace ours::cuda {

/// Pinned memory of the host, zeroed.
std::shared_ptr<void> pinned_block(size_t bytes, CUcontext context);

/// Memory of the device, in units that CUDA does not share among allocations, since other processes map whole units.
std::shared_ptr<void> device_block(size_t bytes, CUcontext context);

/// What another process needs to map `memory`, which must be the beginning of memory of this process.
MemoryHandle share_block(const void* memory);
std::shared_ptr<void> map_block(const MemoryHandle& handle, CUcontext context);

}  // namespace ours::cuda
