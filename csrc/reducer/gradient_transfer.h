#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/autograd/context/context.h>

#include <utility>

#include "reducer/averaging.h"
#include "reducer/bucket.h"
#include "reducer/device_streams.h"
#include "reducer/gradient_copy.h"
#include "reducer/reducer_errors.h"
#include "reducer/reducer_options.h"
#include "reducer/used_map.h"

namespace ours {

/// Moves gradients into their buckets, and averages out of them to where the program finds its gradients: `.grad`, or
/// during a distributed backward (torch.distributed.autograd) its context.
class GradientTransfer {
 public:
  GradientTransfer(const ReducerOptions& options, const Averaging& averaging, UsedMap& used, ReducerErrors& errors)
      : options_(options), averaging_(averaging), used_(used), errors_(errors) {}

  /// Takes the context of the distributed backward that runs on this thread, if one does.
  void adopt_thread_context() {
    context_ = torch::distributed::autograd::ThreadLocalDistAutogradContext::getContextPtr();
  }
  void forget_context() { context_.reset(); }
  bool has_gradient(const at::Tensor& parameter) const;

  // Into a bucket.

  /// Brings a gradient into the slot of its bucket or, with `in_place` and if only its parameter owns it, has it
  /// reduced where it lies. Returns whether the latter is the case. `incoming` is the tensor that autograd
  /// accumulated; perhaps undefined.
  bool store(Bucket& bucket, size_t slot_index, const at::Tensor& incoming, bool in_place);
  /// Completes a bucket in which all gradients have been stored: makes the copies that waited for that, and orders
  /// the streams.
  void complete(Bucket& bucket);

  // Out of a bucket.

  void begin_hand_over() { finished_in_.clear(); }
  /// Gives the averages of a bucket to the parameters.
  void hand_over(Bucket& bucket);
  /// Only notes in which stream the averages of a bucket are ready, for an optimizer that has consumed them.
  void note_finished(const Bucket& bucket) { finished_in_.note(bucket.device()); }

  // At other times.

  /// Leaves the parameters without gradients, so that optimizers pass them over.
  void drop_gradients(const std::vector<at::Tensor>& parameters) const;

  /// Makes existing gradients views of a new bucket, so that nothing that was accumulated is lost and the memory of
  /// the old buckets can be freed.
  void move_into(Bucket& bucket);
  /// Drops the bucket's memory, to which a reduction that was given up may still write. Gradients that are views of it
  /// become views of new memory.
  void renew_memory(Bucket& bucket);
  /// Moves gradients that are being reduced where they lie to memory of their own, because a reduction that was given
  /// up may still write to them.
  void move_out_of_reduction(Bucket& bucket);

 private:
  /// Calls visitor(at::Tensor& gradient), which returns whether it changed what the reference refers to.
  template <typename Visitor>
  void visit(const at::Tensor& parameter, Visitor&& visitor) const {
    if (context_) {
      context_->runGradCallbackForVariable(parameter, std::forward<Visitor>(visitor));
    } else {
      visitor(parameter.mutable_grad());
    }
  }

  void store_sparse(Bucket& bucket, const GradientSlot& slot);
  bool store_dense(Bucket& bucket, size_t slot_index, const at::Tensor& incoming, bool in_place);
  bool copy_into(Bucket& bucket, size_t slot_index, at::Tensor& gradient);
  bool can_be_reduced_in_place(const GradientSlot& slot, const at::Tensor& gradient, const at::Tensor& incoming) const;

  bool defers_copies(const Bucket& bucket) const;
  void order_streams(Bucket& bucket);
  void copy_deferred(Bucket& bucket);
  void show_view(const GradientSlot& slot, const at::Tensor& copied) const;

  void hand_over_slot(const Bucket& bucket, GradientSlot& slot, TensorCopies& copies);
  bool hand_over_in_place(const GradientSlot& slot, const at::Tensor& reduced, at::Tensor& gradient);
  bool hand_over_view(const Bucket& bucket, const GradientSlot& slot, at::Tensor& gradient, TensorCopies& copies);
  void copy_back(const GradientSlot& slot, const at::Tensor& gradient, TensorCopies& copies) const;

  const ReducerOptions& options_;
  const Averaging& averaging_;
  UsedMap& used_;
  ReducerErrors& errors_;
  torch::distributed::autograd::ContextPtr context_;
  StreamSet finished_in_;  ///< the streams in which the averages of the last backward were handed over
};

}  // namespace ours
