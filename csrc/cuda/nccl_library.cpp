#include "cuda/nccl_library.h"

#include <dlfcn.h>

#include <utility>

#include "cuda/cuda_device.h"
#include "cuda/nccl_group.h"

// NCCL itself. Its library is looked for when it is first needed.

namespace ours::cuda {
namespace {

constexpr int kOldest = 21800;  // whose calls all return at once if they are told to

struct Library {
  Nccl functions;
  int version = 0;
  std::string obstacle;
};

template <class Result, class... Parameters>
void find(void* library, NcclFunction<Result(Parameters...)>& function) {
  function.run = reinterpret_cast<Result (*)(Parameters...)>(dlsym(library, function.name));
}

/// Makes every call with the device's context.
template <class Result, class... Parameters>
void with_context(CUcontext context, NcclFunction<Result(Parameters...)>& function) {
  function.run = [context, run = std::move(function.run)](Parameters... parameters) {
    const ContextGuard guard(context);
    return run(parameters...);
  };
}

Library load() {
  Library found;
  // Never closed. This is the library that torch has loaded, as a program with tensors of CUDA has a torch for CUDA.
  void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    found.obstacle = "NCCL's library (libnccl.so.2) is neither loaded nor found: a torch for CUDA brings it along";
    return found;
  }
  found.functions.visit([&](auto& function) {
    find(library, function);
    if (!function.run) found.obstacle = std::string("the NCCL that was found has no ") + function.name;
  });
  if (found.functions.get_version.run) found.functions.get_version.run(&found.version);
  if (found.obstacle.empty() && found.version < kOldest) {
    found.obstacle = "NCCL " + std::to_string(found.version) + " is older than 2.18: install a newer one";
  }
  return found;
}

const Library& nccl() {
  static const Library kLibrary = load();
  return kLibrary;
}

}  // namespace

std::string why_no_nccl() { return nccl().obstacle; }

std::string nccl_version() {
  if (!nccl().obstacle.empty()) return "";
  const int version = nccl().version;
  return "NCCL " + std::to_string(version / 10000) + "." + std::to_string(version % 10000 / 100) + "." +
         std::to_string(version % 100);
}

std::shared_ptr<Group> make_nccl_group(std::shared_ptr<Group> host, std::shared_ptr<Device> device, Deadline deadline) {
  if (!nccl().obstacle.empty()) throw DeviceError(nccl().obstacle);
  const CUcontext context = dynamic_cast<const CudaDevice&>(*device).context();
  auto functions = std::make_shared<Nccl>(nccl().functions);
  functions->visit([&](auto& function) { with_context(context, function); });
  return NcclGroup::make(std::move(functions), std::move(host), std::move(device), deadline);
}

}  // namespace ours::cuda
