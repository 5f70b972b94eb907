#pragma once

#include <memory>
#include <string>

#include "collectives/group.h"
#include "device/device.h"

namespace ours::cuda {

/// Why there can be no group over NCCL in this process; empty if there can.
std::string why_no_nccl();

/// "NCCL 2.30.7", or empty.
std::string nccl_version();

std::shared_ptr<Group> make_nccl_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device, Deadline deadline);

}  // namespace ours::cuda
