#include "backend/device/devices.h"

#include <map>
#include <mutex>

#include "common/own_library.h"

namespace ours {

namespace {

/// The path that was set for the type, or an empty one. Sets `path`, if it is given.
std::string path_of(c10::DeviceType type, const std::string* path = nullptr) {
  // Never destroyed: threads may outlive static destructors.
  static auto* const kMutex = new std::mutex;
  static auto* const kPaths = new std::map<c10::DeviceType, std::string>;
  const std::lock_guard<std::mutex> lock(*kMutex);
  return path == nullptr ? (*kPaths)[type] : (*kPaths)[type] = *path;
}

}  // namespace

bool serves_devices(c10::DeviceType type) { return type == c10::DeviceType::CUDA || !path_of(type).empty(); }

DeviceLibrary& device_library_of(c10::DeviceType type) {
  std::string path = path_of(type);
  if (path.empty() && type == c10::DeviceType::CUDA) path = find_own_library("_cuda");
  if (!path.empty()) return load_device_library(path);
  throw DeviceError("this copy of ourddp was built without CUDA (there is no _cuda library in " + own_folder() +
                    "). Install the CUDA toolkit, with nvcc, and build again: OURS_WITH_CUDA=1 makes a build that "
                    "finds none fail. Until then move tensors with .cpu(), or give CUDA a backend of its own: "
                    "init_process_group(\"cpu:ours,cuda:nccl\")");
}

void use_device_library(c10::DeviceType type, const std::string& path) { path_of(type, &path); }

}  // namespace ours
