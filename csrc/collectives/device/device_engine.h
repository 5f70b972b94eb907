#pragma once

#include <string>
#include <vector>

#include "common/options.h"

namespace ours {

/// What one rank tells the others of its device.
struct DeviceFacts {
  std::string identity;       ///< Device::identity()
  std::string hardware;       ///< Device::hardware()
  std::vector<bool> reaches;  ///< by rank: whether it reaches that rank's device
  std::string why_no_vendor;  ///< DeviceLibrary::why_no_vendor_group()
  DeviceEngine wish = DeviceEngine::Auto;
  /// Why ranks could not map each other's memory when they tried to, the same on all; empty: they could, or have not
  /// yet.
  std::string why_not_mapped;
};

struct DeviceChoice {
  DeviceEngine engine;  ///< not Auto
  std::string why;      ///< "each rank has a device of its own"
};

/// How the ranks of a group, on so many nodes, move the data of their devices: pure, so that all ranks choose the same.
/// Throws InvalidArgument with the reason where it cannot be what was wished for, or wishes differ.
///
/// NCCL where each rank has a device of its own; otherwise, on one node, the devices' memory mapped by all ranks
/// ("ipc"); otherwise through the memory of the hosts ("staging").
DeviceChoice choose_device_engine(int nodes, const std::vector<DeviceFacts>& facts);

/// Why an engine cannot be used, or empty.
std::string why_no_nccl(const std::vector<DeviceFacts>& facts);
std::string why_no_ipc(int nodes, const std::vector<DeviceFacts>& facts);

}  // namespace ours
