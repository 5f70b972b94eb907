#include "device/device_checks.h"

#include <string>

#include "common/error.h"
#include "device/device.h"

namespace ours {

void check_device_reduction(size_t results, size_t sources, DType dtype, const Reduction& reduction) {
  check_supported(reduction.kind, dtype);
  if (sources < 1 || results < 1 || sources > kMostDeviceRanks || results > kMostDeviceRanks) {
    throw InvalidArgument("a reduction on a device takes 1 to " + std::to_string(kMostDeviceRanks) +
                          " sources and results, got " + std::to_string(sources) + " and " + std::to_string(results));
  }
  if (reduction.kind == ReduceKind::Avg && reduction.ranks < 1) {
    throw InvalidArgument("AVG needs the number of ranks, got " + std::to_string(reduction.ranks));
  }
}

}  // namespace ours
