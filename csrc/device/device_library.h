#pragma once

#include <memory>
#include <string>
#include <vector>

#include "device/device.h"

// The accelerator's part of the package is a library of its own (ourddp/_cuda.so), so that everything else works
// where the accelerator's own libraries are missing.

namespace ours {

class Group;

/// Changes with every change of the interfaces that cross between the libraries.
constexpr int kDeviceInterface = 10;

/// Everything that such a library offers. There is one in a process, and it is never unloaded.
class DeviceLibrary {
 public:
  virtual ~DeviceLibrary() = default;

  /// "CUDA 13.0, sm_80 sm_90 PTX 120": for people.
  virtual std::string describe() const = 0;

  /// The names of this process's devices, by index, without opening any. Throws DeviceError if they cannot be found
  /// out.
  virtual std::vector<std::string> device_names() const = 0;

  /// Device number `index` of this process, always the same object. Throws DeviceError if there is none.
  virtual std::shared_ptr<Device> device(int index) = 0;

  /// Why there can be no group over the vendor's own library (NCCL) here; empty if there can.
  virtual std::string why_no_vendor_group() const = 0;

  /// Makes a group over the vendor's own library for the ranks of `host`, each of which has a device of its own and
  /// calls this at the same time. The new group uses `host` to agree on a communicator and to compare what is called.
  virtual std::shared_ptr<Group> make_vendor_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device,
                                                   Deadline deadline) = 0;

  /// "NCCL 2.30.7", or empty.
  virtual std::string vendor_version() const = 0;
};

/// The library at `path`, loaded on the first call. Throws DeviceError saying why it cannot be used.
DeviceLibrary& load_device_library(const std::string& path);

}  // namespace ours

/// The function that such a library exports. Returns null if the library was built for another kDeviceInterface.
extern "C" ours::DeviceLibrary* ours_device_library(int interface_version);
