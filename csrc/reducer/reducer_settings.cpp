#include <c10/util/Exception.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "reducer/reducer.h"

// What a program sets in a Reducer between steps.

namespace ours {

void Reducer::register_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const Lock lock(mutex_);
  TORCH_CHECK(!averaging_.has_hook(),
              "register_comm_hook or register_builtin_comm_hook can only be called once: a communication hook is "
              "registered already.");
  TORCH_CHECK(!unfinished_,
              "A communication hook cannot be registered while gradients are being reduced, because some have already "
              "been reduced without it. Register it before backward begins.");
  averaging_.set_hook(std::move(hook));
  renew_buckets_for_weights();
  hooks_.set_runs_program_code();
}

void Reducer::set_weight(double weight) {
  const Lock lock(mutex_);
  TORCH_CHECK(!unfinished_,
              "set_weight() cannot be called while gradients are being reduced. Call it before backward.");
  averaging_.weights().set(weight);
  use_weights();
}

void Reducer::use_weights() {
  const Lock lock(mutex_);
  if (averaging_.weights().in_use()) return;
  averaging_.weights().use();
  renew_buckets();
}

void Reducer::set_static_graph() {
  const Lock lock(mutex_);
  if (record_.iterations() > 0) {
    errors_.raise("set_static_graph() should be called before training loop starts and after DDP is constructed.");
  }
  static_graph_.enable();
  used_.track();
  plan_.allow_rebuilding();
}

void Reducer::set_mixed_precision_dtype(at::ScalarType dtype) {
  const Lock lock(mutex_);
  mixed_precision_dtype_ = dtype;
  renew_buckets();
}

void Reducer::install_futures(std::vector<FuturePtr> futures) {
  const Lock lock(mutex_);
  for (FuturePtr& future : futures) installed_futures_.push_back(std::move(future));
}

void Reducer::set_manual_finalization(bool required) {
  const Lock lock(mutex_);
  TORCH_CHECK(!expects_gradients_ && !unfinished_,
              "Manual finalization cannot be switched between forward and the end of backward. Set it before forward.");
  manual_finalization_ = required;
}

void Reducer::reset_state() {
  const Lock lock(mutex_);
  expects_gradients_ = false;
  unfinished_ = false;
  next_bucket_ = 0;
  std::fill(arrived_.begin(), arrived_.end(), true);
  installed_futures_.clear();
  plan_.start_anew();
  averaging_.begin_backward();
  averaging_.end_backward();
  in_place_.drop_memory();
  used_.reset();
  static_graph_.forget_record();
  transfer_.forget_context();
  for (Bucket& bucket : buckets_) {
    transfer_.move_out_of_reduction(bucket);
    bucket.reset();
  }
}

void Reducer::set_process_group(GroupPtr group) {
  const Lock lock(mutex_);
  averaging_.set_group(std::move(group));
  renew_buckets_for_weights();
  in_place_.drop_memory();
  if (options_.gradient_as_bucket_view) return;
  for (Bucket& bucket : buckets_) bucket.release();
}

}  // namespace ours
