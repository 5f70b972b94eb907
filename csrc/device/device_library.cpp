#include "device/device_library.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

namespace ours {
namespace {

using Open = decltype(&ours_device_library);

std::string loader_error() {
  const char* reason = dlerror();  // NOLINT(concurrency-mt-unsafe): glibc keeps one for each thread
  return reason == nullptr ? "the loader does not say why" : reason;
}

DeviceLibrary& load(const std::string& path) {
  // Never closed: devices have threads, streams and memory, and code that runs when the process ends.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw DeviceError("the library for devices at " + path + " cannot be loaded: " + loader_error() +
                      ". Build ourddp again on this machine");
  }
  const auto open = reinterpret_cast<Open>(dlsym(library, "ours_device_library"));
  if (open == nullptr) {
    throw DeviceError(path + " is no library for devices: " + loader_error() + ". Build ourddp again");
  }
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
