#include "reducer/comm_hooks.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include "reducer/group_reductions.h"

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
    // Dividing first keeps the sum of many ranks within the narrow range.
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

}  // namespace ours
