#include "reducer/gradient_transfer.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "reducer/gradient_copy.h"

namespace ours {
namespace {

/// Whether only its parameter can see the memory of `gradient`, so that no other tensor of the program and no pending
/// work of autograd can. For a hook on the accumulation of that gradient: `incoming` is what the hook was given;
/// autograd keeps it until the hook returns, and it may be the same memory.
bool is_owned_by_parameter(const at::Tensor& gradient, const at::Tensor& incoming) {
  // A gradient with a graph of its own is part of later computations.
  if (gradient.requires_grad()) return false;
  size_t tensors = 1;        // those that refer to the gradient's memory
  size_t gradient_uses = 1;  // the parameter
  if (incoming.defined() && incoming.has_storage() && incoming.is_alias_of(gradient)) {
    // A gradient may come as a view, as that of a transposed weight does; then the view holds its base.
    if (incoming.is_view()) {
      if (incoming._base().use_count() != 1) return false;
      ++tensors;
    }
    if (incoming.is_same(gradient)) {
      ++gradient_uses;
    } else {
      if (incoming.use_count() != 1) return false;
      ++tensors;
    }
  }
  return gradient.use_count() == gradient_uses && gradient.storage().use_count() == tensors;
}

}  // namespace

bool GradientTransfer::has_gradient(const at::Tensor& parameter) const {
  bool defined = false;
  visit(parameter, [&](const at::Tensor& gradient) {
    defined = gradient.defined();
    return false;
  });
  return defined;
}

void GradientTransfer::drop_gradients(const std::vector<at::Tensor>& parameters) const {
  for (const at::Tensor& parameter : parameters) {
    visit(parameter, [](at::Tensor& gradient) {
      gradient.reset();
      return true;
    });
  }
}

bool GradientTransfer::store(Bucket& bucket, size_t slot_index, const at::Tensor& incoming, bool in_place) {
  bucket.streams.note(bucket.device());
  if (bucket.sparse()) {
    store_sparse(bucket, bucket.slots()[slot_index]);
    return false;
  }
  bucket.allocate(*averaging_.group(), !in_place || options_.gradient_as_bucket_view);
  return store_dense(bucket, slot_index, incoming, in_place);
}

void GradientTransfer::store_sparse(Bucket& bucket, const GradientSlot& slot) {
  visit(slot.parameter, [&](at::Tensor& gradient) {
    if (!gradient.defined()) {
      bucket.set_sparse_gradient(empty_sparse_gradient(slot.parameter));
      return false;
    }
    if (!gradient.is_sparse()) {
      errors_.raise("Expected variable to have sparse gradient: ", errors_.parameter(slot.parameter_index),
                    " got a dense one. Construct its module with sparse=False.");
    }
    if (averaging_.sparse_divisor() != 1) gradient.div_(averaging_.sparse_divisor());
    bucket.set_sparse_gradient(gradient);
    return false;
  });
}

bool GradientTransfer::store_dense(Bucket& bucket, size_t slot_index, const at::Tensor& incoming, bool in_place) {
  GradientSlot& slot = bucket.slots()[slot_index];
  slot.kept = options_.gradient_as_bucket_view && used_.may_be_unused(slot.parameter_index);
  bool reduced_in_place = false;
  visit(slot.parameter, [&](at::Tensor& gradient) {
    if (!gradient.defined()) {
      bucket.place(*averaging_.group(), slot);
      slot.view.zero_();
      return false;
    }
    if (slot.view.defined() && gradient.is_alias_of(slot.view)) {
      // The bucket is about to change; a gradient that may have to stay moves out of it.
      if (slot.kept) gradient = gradient.detach().clone();
      if (averaging_.scale() != 1.0) copy_scaled(slot.view, slot.view, averaging_.scale());
      return slot.kept;
    }
    if (at::GradMode::is_enabled() && gradient.requires_grad()) {
      TORCH_WARN_ONCE(
          "backward(create_graph=True): the gradients are averaged over the ranks, but a backward through them runs "
          "through this rank's graph alone, and its results are averaged only if it accumulates into parameters.");
    }
    reduced_in_place = in_place && can_be_reduced_in_place(slot, gradient, incoming);
    if (reduced_in_place) {
      slot.in_place_version = gradient._version();
      slot.in_place = gradient.detach().as_strided({gradient.numel()}, {1});
      return false;
    }
    return copy_into(bucket, slot_index, gradient);
  });
  return reduced_in_place;
}

bool GradientTransfer::can_be_reduced_in_place(const GradientSlot& slot, const at::Tensor& gradient,
                                               const at::Tensor& incoming) const {
  if (averaging_.scale() != 1.0 || slot.bytes() < kLeastInPlaceBytes) return false;
  // A parameter that no rank used must keep its gradient.
  if (used_.may_be_unused(slot.parameter_index)) return false;
  return slot.fits(gradient) && is_owned_by_parameter(gradient, incoming);
}

bool GradientTransfer::copy_into(Bucket& bucket, size_t slot_index, at::Tensor& gradient) {
  GradientSlot& slot = bucket.slots()[slot_index];
  bucket.place(*averaging_.group(), slot);
  const std::string misfit = describe_gradient_misfit(gradient, slot.view);
  if (!misfit.empty()) {
    errors_.raise("The gradient of ", errors_.parameter(slot.parameter_index), " cannot be reduced: ", misfit, ".");
  }
  if (defers_copies(bucket)) {
    bucket.deferred.push_back({slot_index, gradient});
    return false;
  }
  copy_scaled(slot.view, gradient, averaging_.scale());
  if (!options_.gradient_as_bucket_view || slot.kept) return false;
  gradient = slot.gradient_view();
  return true;
}

bool GradientTransfer::defers_copies(const Bucket& bucket) const {
  return !bucket.device().is_cpu() || (options_.batched_grad_copy && !options_.gradient_as_bucket_view);
}

void GradientTransfer::complete(Bucket& bucket) {
  order_streams(bucket);
  copy_deferred(bucket);
}

void GradientTransfer::order_streams(Bucket& bucket) {
  const c10::Device device = bucket.device();
  if (device.is_cpu()) return;
  // Autograd runs the accumulator of each gradient in a stream of its own choice; the current stream is one of these.
  if (bucket.streams.join(device)) {
    for (const DeferredGradient& deferred : bucket.deferred) keep_for_current_stream(deferred.gradient);
  }
  // The last averages may still be read from the buffer.
  finished_in_.join(device);
  if (bucket.buffer().defined()) keep_for_current_stream(bucket.buffer());
}

void GradientTransfer::copy_deferred(Bucket& bucket) {
  if (bucket.deferred.empty()) return;
  TensorCopies copies;
  for (const auto& [index, gradient] : bucket.deferred) copies.add(bucket.slots()[index].view, gradient);
  copies.run(averaging_.scale());
  if (options_.gradient_as_bucket_view) {
    for (const auto& [index, gradient] : bucket.deferred) show_view(bucket.slots()[index], gradient);
  }
  bucket.deferred.clear();
}

void GradientTransfer::show_view(const GradientSlot& slot, const at::Tensor& copied) const {
  if (slot.kept) return;
  visit(slot.parameter, [&](at::Tensor& gradient) {
    // If the program has replaced the gradient since, the end of backward reports it.
    if (!gradient.is_same(copied)) return false;
    gradient = slot.gradient_view();
    return true;
  });
}

void GradientTransfer::hand_over(Bucket& bucket) {
  if (bucket.sparse()) {
    GradientSlot& slot = bucket.slots().front();
    // It may be the gradient itself.
    if (averaging_.result_scale() != 1.0) scale_in_place(bucket.buffer(), averaging_.result_scale());
    visit(slot.parameter, [&](at::Tensor& gradient) {
      // If it is undefined, only other ranks had a gradient.
      if (gradient.defined() || bucket.buffer()._nnz() == 0) return false;
      gradient = bucket.buffer();
      return true;
    });
    return;
  }
  note_finished(bucket);
  TensorCopies copies;
  for (GradientSlot& slot : bucket.slots()) {
    // A parameter that no rank used keeps its gradient, or the lack of one.
    if (!used_.unused_everywhere(slot.parameter_index)) hand_over_slot(bucket, slot, copies);
  }
  copies.run(averaging_.result_scale());
  keep_for_current_stream(bucket.buffer());
}

void GradientTransfer::hand_over_slot(const Bucket& bucket, GradientSlot& slot, TensorCopies& copies) {
  const at::Tensor in_place = std::exchange(slot.in_place, {});
  visit(slot.parameter, [&](at::Tensor& gradient) {
    if (in_place.defined()) return hand_over_in_place(slot, in_place, gradient);
    // In mixed precision the bucket cannot be viewed: its type is not that of the gradient.
    const bool can_view = slot.view.scalar_type() == slot.parameter.scalar_type();
    if (options_.gradient_as_bucket_view && can_view) return hand_over_view(bucket, slot, gradient, copies);
    if (!gradient.defined()) {
      const auto options = slot.result.options().dtype(slot.parameter.scalar_type());
      gradient = at::empty_strided(slot.view.sizes(), slot.view.strides(), options);
    }
    copy_back(slot, gradient, copies);
    return true;
  });
}

bool GradientTransfer::hand_over_in_place(const GradientSlot& slot, const at::Tensor& reduced, at::Tensor& gradient) {
  if (gradient.defined() && gradient.is_alias_of(reduced)) {
    if (gradient._version() != slot.in_place_version) {
      errors_.raise("The gradient of ", errors_.parameter(slot.parameter_index),
                    " was changed during backward, while it was being averaged. Change gradients after backward, or "
                    "set OURS_REDUCE_IN_PLACE=0.");
    }
    if (averaging_.result_scale() != 1.0) scale_in_place(reduced, averaging_.result_scale());
    // Autograd has not seen the reduction: a backward that saved the gradient must be able to see the change.
    gradient.unsafeGetTensorImpl()->bump_version();
    return false;
  }
  // The program has replaced the gradient since.
  if (!gradient.defined()) gradient = at::empty_strided(slot.parameter.sizes(), slot.strides, reduced.options());
  copy_scaled(gradient, slot.shaped(reduced), averaging_.result_scale());
  return true;
}

bool GradientTransfer::hand_over_view(const Bucket& bucket, const GradientSlot& slot, at::Tensor& gradient,
                                      TensorCopies& copies) {
  if (!slot.result.is_alias_of(slot.view)) {
    copy_back(slot, slot.view, copies);
  } else if (averaging_.result_scale() != 1.0) {
    copies.scale(slot.view);
  }
  if (!gradient.defined() || slot.kept) {
    gradient = slot.gradient_view();
    return true;
  }
  if (!gradient.is_alias_of(bucket.buffer())) {
    errors_.raise(
        "Detected at least one parameter gradient is not the expected DDP bucket view with "
        "gradient_as_bucket_view=True: ",
        errors_.parameter(slot.parameter_index),
        ". A hook has replaced the gradient during backward; construct the module with "
        "gradient_as_bucket_view=False, or change the gradient in place.");
  }
  return false;
}

void GradientTransfer::copy_back(const GradientSlot& slot, const at::Tensor& gradient, TensorCopies& copies) const {
  // The operators on lists do not write to conjugated tensors.
  if (gradient.is_cpu() || gradient.is_conj() || gradient.is_neg()) {
    copy_scaled(gradient, slot.result, averaging_.result_scale());
  } else {
    copies.add(gradient, slot.result);
  }
}

void GradientTransfer::move_into(Bucket& bucket) {
  if (!bucket.allocated()) return;
  for (GradientSlot& slot : bucket.slots()) {
    visit(slot.parameter, [&](at::Tensor& gradient) {
      if (!gradient.defined() || !describe_gradient_misfit(gradient, slot.view).empty()) return false;
      copy_scaled(slot.view, gradient, 1.0);
      gradient = slot.gradient_view();
      return true;
    });
  }
}

void GradientTransfer::renew_memory(Bucket& bucket) {
  const bool is_shown = options_.gradient_as_bucket_view && bucket.allocated();
  bucket.release();
  if (!is_shown) return;
  bucket.allocate(*averaging_.group(), /*whole=*/true);
  move_into(bucket);
}

void GradientTransfer::move_out_of_reduction(Bucket& bucket) {
  for (const GradientSlot& slot : bucket.slots()) {
    if (!slot.in_place.defined()) continue;
    visit(slot.parameter, [&](at::Tensor& gradient) {
      if (!gradient.defined() || !gradient.is_alias_of(slot.in_place)) return false;
      gradient = gradient.detach().clone();
      return true;
    });
  }
}

}  // namespace ours
