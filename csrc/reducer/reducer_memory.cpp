#include "common/options.h"
#include "reducer/comm_hooks.h"
#include "reducer/gradient_copy.h"
#include "reducer/reducer.h"

// What gradients lie in: memory that the backend reduces without copies, if autograd can be made to use it; else a
// bucket's, which they are copied into.

namespace ours {

bool Reducer::may_reduce_in_place() const {
  // With manual finalization the program goes on while gradients are reduced.
  return ours::options().reduce_in_place && backend_.pieces && !hook_ && !options_.gradient_as_bucket_view &&
         !mixed_precision_dtype_ && !optimizer_in_backward_ && !manual_finalization_;
}

void Reducer::prepare_for_accumulation() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  open_memory();
}

void Reducer::open_memory() {
  if (was_seen_ || !may_reduce_in_place() || !backend_.heap || options_.lazy_bucket_allocation) return drop_memory();
  // Where a reduction has failed, peers may still write to the gradients that it left.
  if (unfinished_) return;
  if (!memory_) {
    std::vector<size_t> sizes;
    for (size_t index = 0; index < parameters_.size(); ++index) {
      const size_t bytes = parameters_[index].nbytes();
      if (!is_sparse(index) && bytes >= kLeastInPlaceBytes) sizes.push_back(bytes);
    }
    // No more than the bucket that is saved.
    memory_ = GradientMemory::create(heap_of(*group_, parameters_.front().device()), sizes,
                                     static_cast<size_t>(options_.bucket_bytes_cap));
  }
  memory_->open();
}

void Reducer::close_memory() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (memory_) memory_->close();
}

void Reducer::drop_memory() {
  if (memory_) memory_->release();
  memory_.reset();
}

void Reducer::allocate(Bucket& bucket) { bucket.allocate(*group_, whole_buckets_ || options_.gradient_as_bucket_view); }

void Reducer::adopt_existing_gradients() {
  // Gradients that have been accumulated so far move along, so that the old buckets can go and nothing is lost.
  for (Bucket& bucket : buckets_) {
    if (!bucket.allocated()) continue;
    for (GradientSlot& slot : bucket.slots()) {
      gradients_.visit(slot.parameter, [&](at::Tensor& gradient) {
        if (!gradient.defined() || !describe_gradient_misfit(gradient, slot.view).empty()) return false;
        copy_scaled(slot.view, gradient, 1.0);
        gradient = slot.gradient_view();
        return true;
      });
    }
  }
}

}  // namespace ours
