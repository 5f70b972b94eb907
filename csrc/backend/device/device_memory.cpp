#include "backend/device/device_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "device/deferred_release.h"

namespace ours {

namespace {

StreamHandle current_stream(at::Device place) {
  const c10::impl::VirtualGuardImpl guard(place.type());
  return guard.getStreamNativeHandle(guard.getStream(place));
}

}  // namespace

at::Tensor make_device_tensor(const std::shared_ptr<DeviceContext>& context, int64_t size,
                              const at::TensorOptions& options) {
  const std::shared_ptr<Group> group = context->device() == options.device() ? context->made_group() : nullptr;
  if (!group || !group->allocates()) return at::empty({size}, options);
  release_deferred();
  const size_t bytes = static_cast<size_t>(size) * options.dtype().itemsize();
  std::shared_ptr<void> memory;
  try {
    memory = group->allocate(bytes);
  } catch (const Error& error) {
    TORCH_WARN("A tensor of ", bytes, " bytes gets ordinary memory, which reductions have to copy: ", error.what());
  }
  if (!memory) return at::empty({size}, options);
  void* const data = memory.get();
  const auto release = [device = context->accelerator().shared_from_this(), place = options.device(),
                        home = current_stream(options.device()), memory = std::move(memory)](void*) mutable {
    release_after(*device, {home, current_stream(place)}, std::move(memory));
  };
  return at::for_blob(data, {size}).options(options).target_device(options.device()).deleter(release).make_tensor();
}

}  // namespace ours
