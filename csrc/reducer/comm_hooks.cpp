#include "reducer/comm_hooks.h"

#include <ATen/core/jit_type.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/debug.h>

#include <string>

namespace ours {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

class AllReduceHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    at::Tensor tensor = bucket.getBuffer();
    tensor.div_(state_->getSize());
    return start_all_reduce(*state_, {tensor}, c10d::ReduceOp::SUM)->getFuture();
  }
};

class HalfPrecisionHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  using CppCommHookInterface::CppCommHookInterface;

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    const at::Tensor full = bucket.getBuffer();
    at::Tensor half = full.to(at::kHalf);
    // Divided first, so that the sum of many ranks stays within the narrow range.
    half.div_(state_->getSize());
    const FuturePtr sent = start_all_reduce(*state_, {half}, c10d::ReduceOp::SUM)->getFuture();
    return sent->then(
        [full, half](c10::ivalue::Future& done) -> c10::IValue {
          done.value();  // rethrows
          full.copy_(half);
          return full;
        },
        c10::TensorType::get());
  }
};

}  // namespace

std::unique_ptr<c10d::CommHookInterface> make_builtin_hook(c10d::BuiltinCommHookType type, const GroupPtr& group) {
  switch (type) {
    case c10d::BuiltinCommHookType::ALLREDUCE:
      return std::make_unique<AllReduceHook>(group);
    case c10d::BuiltinCommHookType::FP16_COMPRESS:
      return std::make_unique<HalfPrecisionHook>(group);
  }
  TORCH_CHECK_VALUE(false, "Unknown built-in communication hook; use ALLREDUCE or FP16_COMPRESS.");
}

ReductionAbilities abilities_of(c10d::ProcessGroup& group, at::Device device) {
  std::string name;
  bool allocates = false;
  try {
    const auto backend = group.getBackend(device.type());
    name = backend->getBackendName();
    allocates = backend->supportsTensorAlloc(device.has_index() ? device.index() : c10::DeviceIndex{0});
  } catch (const std::exception&) {
    // A process group written in Python has no c10d backend to ask.
    return {};
  }
  const bool ours = name == "ours";
  // With TORCH_DISTRIBUTED_DEBUG=DETAIL, c10d compares the tensors of all ranks before each collective, and ranks may
  // cut a bucket in different places.
  const bool compared = c10d::debug_level() == c10d::DebugLevel::Detail;
  // Where gradients lie on an accelerator, peers cannot reach them.
  return {ours || name == "nccl", ours && !compared && device.is_cpu(), ours && allocates};
}

std::shared_ptr<c10::Allocator> heap_of(c10d::ProcessGroup& group, at::Device device) {
  return group.getBackend(device.type())->getMemAllocator();
}

at::Tensor allocate_buffer(c10d::ProcessGroup& group, int64_t size, const at::TensorOptions& options) {
  const at::Device device = options.device();
  if (abilities_of(group, device).heap) {
    return group.getBackend(device.type())->allocateTensor(static_cast<long>(size), options);
  }
  return at::empty({size}, options);
}

c10::intrusive_ptr<c10d::Work> start_all_reduce(c10d::ProcessGroup& group, std::vector<at::Tensor> tensors,
                                                c10d::ReduceOp::RedOpType op) {
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = op;
  // Where a bucket is one piece on this rank and several on another, the two calls are the same to `ours`.
  if (tensors.size() > 1) return group.allreduce_coalesced(tensors, options);
  return group.allreduce(tensors, options);
}

}  // namespace ours
