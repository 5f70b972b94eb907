#include "backend/heap_allocator.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include "common/error.h"

namespace ours {

std::shared_ptr<HeapAllocator> HeapAllocator::make(const std::shared_ptr<Group>& group) {
  return {new HeapAllocator(group), let_go};
}

void HeapAllocator::let_go(HeapAllocator* allocator) {
  if (!allocator->used_) {
    delete allocator;
    return;
  }
  const std::lock_guard<std::mutex> lock(allocator->mutex_);
  allocator->group_.reset();
}

std::shared_ptr<Group> HeapAllocator::group() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return group_.lock();
}

c10::DataPtr HeapAllocator::allocate(size_t bytes) {
  used_ = true;
  std::shared_ptr<void> memory;
  try {
    if (const std::shared_ptr<Group> group = this->group()) memory = group->allocate(bytes);
  } catch (const SystemError& error) {
    TORCH_WARN("A tensor of ", bytes, " bytes gets ordinary memory, which reductions have to copy: ", error.what());
  }
  if (!memory) return c10::GetDefaultCPUAllocator()->allocate(bytes);
  void* const data = memory.get();
  auto owner = std::make_unique<std::shared_ptr<void>>(std::move(memory));
  const auto release = [](void* context) { delete static_cast<std::shared_ptr<void>*>(context); };
  return {data, owner.release(), release, at::Device(at::kCPU)};
}

void HeapAllocator::copy_data(void* to, const void* from, size_t bytes) const { default_copy_data(to, from, bytes); }

at::Tensor HeapAllocator::tensor(int64_t size, const at::TensorOptions& options) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  return at::Tensor(at::detail::empty_generic({size}, this, keys, c10::typeMetaToScalarType(options.dtype()),
                                              /*memory_format_opt=*/std::nullopt));
}

}  // namespace ours
