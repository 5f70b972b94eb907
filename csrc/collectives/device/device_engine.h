#pragma once

#include <string>
#include <vector>

#include "common/options.h"

namespace ours {

/// What one rank tells the others of its device.
struct DeviceFacts {
  std::string identity;       ///< Device::identity()
  std::string hardware;       ///< Device::hardware()
  size_t memory_bytes = 0;    ///< Device::memory_bytes()
  std::vector<bool> reaches;  ///< by rank: whether it reaches that rank's device
  std::string why_no_vendor;  ///< DeviceLibrary::why_no_vendor_group()
  DeviceEngine wish = DeviceEngine::Auto;
  /// Why the ranks could not map each other's memory when they tried to; the same on all ranks. Empty if they could,
  /// or have not tried yet.
  std::string why_not_mapped;
};

struct DeviceChoice {
  DeviceEngine engine;  ///< not Auto
  std::string why;      ///< "each rank has a device of its own"
};

/// Chooses how the ranks of a group, on that many nodes, move the data of their devices. A pure function, so that all
/// ranks choose the same. Throws InvalidArgument with the reason if the wish cannot be granted or the ranks' wishes
/// differ.
///
/// NCCL where each rank has a device of its own; otherwise, on one node, the devices' memory mapped by all ranks
/// ("ipc"); otherwise through the memory of the hosts ("staging").
DeviceChoice choose_device_engine(int nodes, const std::vector<DeviceFacts>& facts);

}  // namespace ours
