#pragma once

#include <c10/core/DeviceType.h>

#include <string>
#include <vector>

#include "device/device_library.h"

// Finds the library that serves the devices of a type.

namespace ours {

/// Whether tensors on devices of that type are accepted. CUDA's are, even if the library is missing:
/// device_library_of() then says what to do.
bool serves_devices(c10::DeviceType type);

/// Loads the library on the first call. Throws DeviceError that says what to install or to build again.
DeviceLibrary& device_library_of(c10::DeviceType type);

/// A report for people of the devices of a type that this process finds.
struct DeviceReport {
  std::string obstacle;  ///< why there is no library for them; empty if there is one
  std::string library;
  std::vector<std::string> devices;
  std::string device_obstacle;  ///< why the devices cannot be found out; empty otherwise
  std::string vendor_version;   ///< the version of the vendor's library for collectives; may be empty
  std::string vendor_obstacle;  ///< why that cannot be used; empty if it can
};

DeviceReport report_devices(c10::DeviceType type);

/// Makes the library at `path` serve devices of that type from now on. For tests, which have devices of their own.
void use_device_library(c10::DeviceType type, const std::string& path);

}  // namespace ours
