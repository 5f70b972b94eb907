#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <c10/util/Exception.h>

#include "reducer/device_copies.h"
#include "reducer/gradient_copy.h"
#include "reducer/reducer.h"

// Copies of a bucket's gradients in one go, and the order of streams around them.

namespace ours {

bool Reducer::defers_copies(const Bucket& bucket) const {
  return bucket.copier != nullptr || (options_.batched_grad_copy && !options_.gradient_as_bucket_view);
}

void Reducer::order_streams(Bucket& bucket) {
  const c10::Device device = bucket.device();
  if (device.is_cpu()) return;
  // Autograd runs the accumulator of each gradient in a stream of its own choice, and this is that of one of them.
  if (bucket.streams.join(device)) {
    for (const DeferredGradient& deferred : bucket.deferred) keep_for_current_stream(deferred.gradient);
  }
  // The buffer may still be read where the last averages were handed over.
  finished_in_.join(device);
  if (bucket.buffer().defined()) keep_for_current_stream(bucket.buffer());
}

void Reducer::copy_deferred(Bucket& bucket) {
  if (bucket.deferred.empty()) return;
  std::vector<PlacedTensor> fused;
  std::vector<at::Tensor> views;
  std::vector<at::Tensor> gradients;
  for (const auto& [index, gradient] : bucket.deferred) {
    const GradientSlot& slot = bucket.slots()[index];
    if (bucket.copier != nullptr && can_place(gradient, slot.view)) {
      fused.push_back({gradient, static_cast<int64_t>(slot.offset)});
    } else {
      views.push_back(slot.view);
      gradients.push_back(gradient.detach());
    }
  }
  if (!fused.empty()) flatten(*bucket.copier, bucket.buffer(), fused, scale_);
  if (!views.empty()) {
    const at::NoGradGuard no_grad;
    at::_foreach_copy_(views, gradients);
    if (scale_ != 1.0) {
      for (const at::Tensor& view : views) view.mul_(scale_);
    }
  }
  if (options_.gradient_as_bucket_view) {
    for (const auto& [index, gradient] : bucket.deferred) show_view(bucket.slots()[index], gradient);
  }
  bucket.deferred.clear();
}

void Reducer::show_view(const GradientSlot& slot, const at::Tensor& copied) const {
  if (slot.kept) return;
  gradients_.visit(slot.parameter, [&](at::Tensor& gradient) {
    // Somebody has replaced it since: the end of backward complains.
    if (!gradient.is_same(copied)) return false;
    gradient = slot.gradient_view();
    return true;
  });
}

void Reducer::copy_back(const Bucket& bucket, const GradientSlot& slot, const at::Tensor& gradient,
                        std::vector<PlacedTensor>& fused) const {
  const bool whole = bucket.copier != nullptr && slot.result.is_alias_of(bucket.result());
  if (whole && gradient.scalar_type() == slot.parameter.scalar_type() && can_place(gradient, slot.result)) {
    fused.push_back({gradient, static_cast<int64_t>(slot.offset)});
  } else {
    copy_scaled(gradient, slot.result, 1.0);
  }
}

}  // namespace ours
