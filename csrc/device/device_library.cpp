#include "device/device_library.h"

#include <map>
#include <mutex>
#include <string>

#include "common/own_library.h"

namespace ours {
namespace {

using Open = decltype(&ours_device_library);

DeviceLibrary& load(const std::string& path) {
  void* library = nullptr;
  try {
    library = load_library(path);
  } catch (const Error& e) {
    throw DeviceError("the library for devices at " + path + " cannot be loaded: " + e.what() +
                      ". Build ourddp again on this machine");
  }
  const auto open = reinterpret_cast<Open>(symbol_of(library, "ours_device_library"));
  if (open == nullptr) throw DeviceError(path + " is no library for devices: build ourddp again");
  DeviceLibrary* opened = open(kDeviceInterface);
  if (opened == nullptr) {
    throw DeviceError(path + " was built for another copy of ourddp (this one has version " +
                      std::to_string(kDeviceInterface) + " of the interface): build ourddp again");
  }
  return *opened;
}

}  // namespace

DeviceLibrary& load_device_library(const std::string& path) {
  static std::mutex mutex;
  static std::map<std::string, DeviceLibrary*> loaded;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = loaded.find(path);
  if (found != loaded.end()) return *found->second;
  DeviceLibrary& library = load(path);
  loaded.emplace(path, &library);
  return library;
}

}  // namespace ours
