#include "device/device_library.h"

#include <filesystem>
#include <string>

#include "support/testing.h"

// Libraries of devices: the one of the stand-in is beside this program.

namespace ours {
namespace {

std::string stand_in_library() { return std::filesystem::canonical("/proc/self/exe").parent_path() / "stand_in.so"; }

TEST(device_library_is_loaded_once_and_has_devices) {
  DeviceLibrary& library = load_device_library(stand_in_library());
  CHECK_EQ(&load_device_library(stand_in_library()), &library);
  CHECK_EQ(library.describe(), "stand-in devices");
  // Exceptions of the library are those of this program.
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, library.device(99)), "there is no stand-in device 99");
}

TEST(device_library_that_is_missing_or_none_is_named) {
  const auto missing = CHECK_THROWS(DeviceError, load_device_library("/nowhere/_cuda.so"));
  CHECK_CONTAINS(missing, "/nowhere/_cuda.so cannot be loaded");
  CHECK_CONTAINS(CHECK_THROWS(DeviceError, load_device_library("libm.so.6")), "is no library for devices");
}

}  // namespace
}  // namespace ours
