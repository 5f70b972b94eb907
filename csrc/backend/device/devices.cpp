#include "backend/device/devices.h"

#include <map>
#include <mutex>

#include "common/own_library.h"

namespace ours {

namespace {

constexpr const char* kCudaLibrary = "_cuda";

struct Paths {
  std::mutex mutex;
  std::map<c10::DeviceType, std::string> by_type;  // guarded by mutex; those that were set

  std::string of(c10::DeviceType type) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = by_type.find(type);
    return found == by_type.end() ? "" : found->second;
  }
};

Paths& paths() {
  static Paths* const kPaths = new Paths;  // never destroyed: threads may outlive static destructors
  return *kPaths;
}

}  // namespace

bool serves_devices(c10::DeviceType type) { return type == c10::DeviceType::CUDA || !paths().of(type).empty(); }

DeviceLibrary& device_library_of(c10::DeviceType type) {
  std::string path = paths().of(type);
  if (path.empty() && type == c10::DeviceType::CUDA) path = find_own_library(kCudaLibrary);
  if (!path.empty()) return load_device_library(path);
  throw DeviceError("this copy of ourddp was built without CUDA (there is no _cuda library in " + own_folder() +
                    "). Install the CUDA toolkit, with nvcc, and build again: OURS_WITH_CUDA=1 makes a build that "
                    "finds none fail. Until then move tensors with .cpu(), or give CUDA a backend of its own: "
                    "init_process_group(\"cpu:ours,cuda:nccl\")");
}

void use_device_library(c10::DeviceType type, const std::string& path) {
  const std::lock_guard<std::mutex> lock(paths().mutex);
  paths().by_type[type] = path;
}

}  // namespace ours
