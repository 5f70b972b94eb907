#pragma once

#include <c10/core/DeviceType.h>

#include <string>

#include "device/device_library.h"

// Finds the library that serves the devices of a type.

namespace ours {

/// Whether tensors on devices of that type are accepted. CUDA's are, even if the library is missing:
/// device_library_of() then says what to do.
bool serves_devices(c10::DeviceType type);

/// Loads the library on the first call. Throws DeviceError that says what to install or to build again.
DeviceLibrary& device_library_of(c10::DeviceType type);

/// Makes the library at `path` serve devices of that type from now on. For tests, which have devices of their own.
void use_device_library(c10::DeviceType type, const std::string& path);

}  // namespace ours
