#include "reducer/comm_hooks.h"

#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include "reducer/group_reductions.h"

namespace ours {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

class AverageHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  AverageHook(const GroupPtr& group, bool half) : CppCommHookInterface(group), half_(half) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    const at::Tensor buffer = bucket.getBuffer();
    const at::Tensor sent = half_ ? buffer.to(at::kHalf) : buffer;
    // Dividing first keeps the sum of many ranks within the narrow range.
    sent.div_(state_->getSize());
    const FuturePtr summed = start_all_reduce(*state_, {sent}, c10d::ReduceOp::SUM)->getFuture();
    if (!half_) return summed;
    return summed->then(
        [buffer, sent](c10::ivalue::Future& done) -> c10::IValue {
          done.value();  // rethrows
          buffer.copy_(sent);
          return buffer;
        },
        c10::TensorType::get());
  }

 private:
  const bool half_;
};

}  // namespace

std::unique_ptr<c10d::CommHookInterface> make_builtin_hook(c10d::BuiltinCommHookType type, const GroupPtr& group) {
  switch (type) {
    case c10d::BuiltinCommHookType::ALLREDUCE:
      return std::make_unique<AverageHook>(group, /*half=*/false);
    case c10d::BuiltinCommHookType::FP16_COMPRESS:
      return std::make_unique<AverageHook>(group, /*half=*/true);
  }
  TORCH_CHECK_VALUE(false, "Unknown built-in communication hook; use ALLREDUCE or FP16_COMPRESS.");
}

}  // namespace ours
