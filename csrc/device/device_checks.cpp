#include "device/device_checks.h"

#include <string>

#include "common/error.h"
#include "device/device.h"

namespace ours {
namespace {

bool is_float(DType type) {
  return type == DType::Float16 || type == DType::BFloat16 || type == DType::Float32 || type == DType::Float64;
}

}  // namespace

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

void check_conversion(DType flat_type, DType piece_type) {
  if (is_float(flat_type) && is_float(piece_type)) return;
  throw InvalidArgument(std::string("a device does not convert between ") + name_of(piece_type) + " and " +
                        name_of(flat_type));
}

}  // namespace ours
