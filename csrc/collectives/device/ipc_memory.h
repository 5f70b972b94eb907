#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "collectives/device/device_heap.h"
#include "collectives/device/mapped_memory.h"

namespace ours {

/// The memory of a group whose ranks map each other's.
struct IpcMemory {
  std::vector<std::string> identities;  ///< the devices, by rank
  std::shared_ptr<LetGoBoard> board;
  std::shared_ptr<DeviceHeap> heap;  ///< with one segment, which is the rank's stage
  std::unique_ptr<MappedMemory> mapped;
  size_t stage_bytes = 0;  ///< every rank's stage has at least this many
  /// Empty if all ranks have mapped the stages of all; otherwise the reason, the same on all ranks. What the devices
  /// say of reaching each other is not enough: containers, for example, may keep processes from each other's memory.
  std::string why_not;
};

/// All ranks of `host` call this at the same time, with the same `stage_bytes`; a rank whose device lacks room for
/// that gets a smaller stage. `call` is under way.
IpcMemory share_device_memory(Group& host, const std::shared_ptr<Device>& device, const Call& call, size_t stage_bytes);

}  // namespace ours
