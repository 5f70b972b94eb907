#pragma once

#include <c10/core/Device.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "reducer/bucket_tuning.h"

namespace ours {

/// Measures what all-reduces of `group` cost for tensors on `device`, with a few of 4 KiB to 4 MiB, alone and beside a
/// computation. Collective; all ranks get the result of the slowest. Takes tens of milliseconds, or tenths of a second
/// over a slow transport.
CommCost measure_comm_cost(c10d::ProcessGroup& group, c10::Device device);

}  // namespace ours
