#pragma once

#include <cstddef>
#include <memory>

#include "device/device.h"

namespace ours::testing {

/// Memory that other processes can map, whose beginning is filled with `fill`.
std::shared_ptr<void> stand_in_memory(size_t bytes, unsigned char fill);

/// `memory` must come from stand_in_memory().
MemoryHandle share_stand_in_memory(const void* memory);
std::shared_ptr<void> map_stand_in_memory(const MemoryHandle& handle);

}  // namespace ours::testing
