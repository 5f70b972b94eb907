#include "reducer/reducer.h"

#include <ATen/ops/tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "reducer/comm_hooks.h"
#include "reducer/gradient_copy.h"
#include "reducer/reducer_errors.h"

namespace ours {
namespace {

at::Device device_of(const std::vector<at::Tensor>& parameters) {
  TORCH_CHECK(!parameters.empty(), "A reducer needs at least one parameter that requires a gradient.");
  return parameters.front().device();
}

}  // namespace

std::shared_ptr<Reducer> Reducer::create(std::vector<at::Tensor> parameters, GroupPtr group, ReducerOptions options) {
  TORCH_CHECK(group, "A reducer needs a process group.");
  const std::shared_ptr<Reducer> reducer(new Reducer(std::move(parameters), std::move(group), std::move(options)));
  reducer->attach();
  return reducer;
}

Reducer::Reducer(std::vector<at::Tensor> parameters, GroupPtr group, ReducerOptions options)
    : parameters_(std::move(parameters)),
      group_(std::move(group)),
      options_(std::move(options)),
      locations_(parameters_.size()),
      arrived_(parameters_.size(), false),
      arrival_ns_(parameters_.size(), 0),
      used_(parameters_.size(), device_of(parameters_)),
      arrivals_expected_(parameters_.size(), 0),
      timer_(device_of(parameters_)) {
  TORCH_CHECK(options_.expect_sparse_gradients.empty() || options_.expect_sparse_gradients.size() == parameters_.size(),
              "expect_sparse_gradients has ", options_.expect_sparse_gradients.size(), " entries for ",
              parameters_.size(), " parameters.");
  backend_ = abilities_of(*group_, parameters_.front().device());
  std::vector<size_t> natural(parameters_.size());
  std::iota(natural.rbegin(), natural.rend(), size_t{0});
  measure_group();
  if (tuning_.enabled && options_.bucket_indices.empty()) tune(natural);
  init_buckets(options_.bucket_indices.empty() ? assign(natural) : options_.bucket_indices);
}

Reducer::~Reducer() { drop_memory(); }

void Reducer::attach() {
  AutogradHooks::Callback callback;
  // The hooks live no longer than this object, which owns them.
  if (options_.attach_to_autograd)
    callback = [this](size_t index, const at::Tensor& incoming) { on_gradient(index, incoming); };
  hooks_.attach(parameters_, std::move(callback));
}

bool Reducer::is_sparse(size_t index) const {
  return !options_.expect_sparse_gradients.empty() && options_.expect_sparse_gradients[index];
}

std::vector<GradientInfo> gradient_infos(const std::vector<at::Tensor>& parameters, const std::vector<bool>& sparse) {
  std::vector<GradientInfo> infos;
  for (size_t index = 0; index < parameters.size(); ++index) {
    const at::Tensor& parameter = parameters[index];
    infos.push_back({static_cast<int64_t>(parameter.nbytes()), static_cast<int>(parameter.scalar_type()),
                     static_cast<int>(parameter.device().type()), parameter.device().index(),
                     !sparse.empty() && sparse.at(index)});
  }
  return infos;
}

std::vector<std::vector<size_t>> Reducer::assign(const std::vector<size_t>& order) const {
  return assign_buckets(gradient_infos(parameters_, options_.expect_sparse_gradients), bucket_caps(), order).buckets;
}

void Reducer::init_buckets(const std::vector<std::vector<size_t>>& indices) {
  // Checks that each parameter is in exactly one bucket.
  decode_buckets(encode_buckets(indices, parameters_.size()), parameters_.size());
  buckets_.clear();
  for (const auto& bucket : indices) {
    for (size_t slot = 0; slot < bucket.size(); ++slot) locations_[bucket[slot]] = {buckets_.size(), slot};
    buckets_.emplace_back(bucket, parameters_, is_sparse(bucket.front()), mixed_precision_dtype_);
    if (options_.find_device) buckets_.back().copier = options_.find_device(buckets_.back().device());
    if (options_.gradient_as_bucket_view && !options_.lazy_bucket_allocation) allocate(buckets_.back());
  }
  next_bucket_ = 0;
  note_layout();
  if (options_.gradient_as_bucket_view) adopt_existing_gradients();
}

bool Reducer::rebuild_buckets() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  require_idle();
  if (!rebuilds_buckets() || rebuild_order_.empty() || tuning_.backwards_left > 0) return false;
  if (rebuild_order_.size() != parameters_.size()) {
    fail(c10::str("Buckets cannot be rebuilt: ", rebuild_order_.size(), " gradients arrived in the first iteration, ",
                  parameters_.size(), " were expected."));
  }
  if (tuning_.enabled) tune(rebuild_order_);
  auto code = encode_buckets(assign(rebuild_order_), parameters_.size());
  code.insert(code.end(), {tuning_.caps.first, tuning_.caps.others});
  // Arrival orders differ between ranks by chance, but all must reduce the same buckets.
  std::vector<at::Tensor> tensors{at::tensor(code, at::kLong).to(parameters_.front().device())};
  group_->broadcast(tensors)->wait();
  const at::Tensor received = tensors.front().cpu();
  const auto* data = received.const_data_ptr<int64_t>();
  const int64_t* caps = data + received.numel() - 2;
  const auto buckets = decode_buckets(std::vector<int64_t>(data, caps), parameters_.size());
  tuning_.caps = {caps[0], caps[1]};
  has_rebuilt_ = true;
  rebuild_order_.clear();
  init_buckets(buckets);
  return true;
}

void Reducer::push_all_rebuilt_parameters() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (!rebuilds_buckets()) return;
  count_backward_for_tuning();
  rebuild_order_.resize(parameters_.size());
  std::iota(rebuild_order_.begin(), rebuild_order_.end(), size_t{0});
}

std::string Reducer::name_of(size_t index) const {
  const auto& names = options_.parameter_names;
  return index < names.size() && !names[index].empty() ? names[index] : "#" + std::to_string(index);
}

void Reducer::require_idle() {
  if (!unfinished_) return;
  UnfinishedReduction state;
  state.rank = group_->getRank();
  state.static_graph = static_graph_;
  state.find_unused_parameters = options_.find_unused_parameters;
  for (size_t index = 0; index < parameters_.size(); ++index) {
    if (arrived_[index]) continue;
    state.missing.push_back(index);
    if (!options_.parameter_names.empty()) state.names.push_back(name_of(index));
  }
  fail(describe_unfinished_reduction(state));
}

void Reducer::fail(std::string message) {
  error_ = message;
  TORCH_CHECK(false, message);
}

void Reducer::check_finalized() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  require_idle();
}

void Reducer::register_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(hook_ == nullptr,
              "register_comm_hook or register_builtin_comm_hook can only be called once: a communication hook is "
              "registered already.");
  TORCH_CHECK(!unfinished_,
              "A communication hook cannot be registered while gradients are being reduced, as some of them have gone "
              "without it. Register it before backward begins.");
  hook_ = std::move(hook);
  hooks_.set_runs_program_code();
}

void Reducer::set_static_graph() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  if (iterations_ > 0) {
    fail("set_static_graph() should be called before training loop starts and after DDP is constructed.");
  }
  static_graph_ = true;
}

void Reducer::set_mixed_precision_dtype(at::ScalarType dtype) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  mixed_precision_dtype_ = dtype;
  std::vector<std::vector<size_t>> indices;
  for (const Bucket& bucket : buckets_) {
    indices.emplace_back();
    for (const GradientSlot& slot : bucket.slots()) indices.back().push_back(slot.parameter_index);
  }
  init_buckets(indices);
}

void Reducer::install_futures(std::vector<FuturePtr> futures) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  for (FuturePtr& future : futures) installed_futures_.push_back(std::move(future));
}

void Reducer::set_manual_finalization(bool required) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(!expects_gradients_ && !unfinished_,
              "Manual finalization cannot be switched between forward and the end of backward. Set it before forward.");
  manual_finalization_ = required;
}

bool Reducer::should_finalize_after_backward() const { return manual_finalization_ && rebuilds_buckets(); }

void Reducer::reset_state() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  has_rebuilt_ = false;
  rebuild_order_.clear();
  expects_gradients_ = false;
  unfinished_ = false;
  all_launched_ = false;
  divisor_ = 0;
  installed_futures_.clear();
  forward_work_.reset();
  gradients_.forget_context();
  drop_memory();
  used_.reset();
  static_recorded_ = false;
  std::fill(arrived_.begin(), arrived_.end(), true);
  for (Bucket& bucket : buckets_) {
    for (GradientSlot& slot : bucket.slots()) {
      if (!slot.in_place.defined()) continue;
      // A reduction that is still under way may write what is no gradient any more.
      gradients_.visit(slot.parameter, [&](at::Tensor& gradient) {
        if (!gradient.defined() || !gradient.is_alias_of(slot.in_place)) return false;
        gradient = gradient.detach().clone();
        return true;
      });
    }
    bucket.reset();
  }
  next_bucket_ = 0;
}

void Reducer::set_process_group(GroupPtr group) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  TORCH_CHECK(group, "A reducer needs a process group.");
  group_ = std::move(group);
  backend_ = abilities_of(*group_, parameters_.front().device());
  drop_memory();
  if (options_.gradient_as_bucket_view) return;
  for (Bucket& bucket : buckets_) bucket.release();
}

void Reducer::set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool use_static_world_size) {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  forward_work_ = std::move(work);
  forward_static_world_size_ = use_static_world_size;
}

std::vector<c10d::GradBucket> Reducer::zero_buckets() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  std::vector<c10d::GradBucket> result;
  for (size_t index = 0; index < buckets_.size(); ++index) {
    const Bucket& bucket = buckets_[index];
    result.push_back(bucket.grad_bucket(
        index, buckets_.size(),
        bucket.sparse() ? empty_sparse_gradient(bucket.slots().front().parameter) : bucket.zeros_to_reduce()));
  }
  return result;
}

int64_t Reducer::iterations() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  return iterations_;
}

ReducerStatus Reducer::status() {
  const std::lock_guard<std::recursive_mutex> lock(mutex_);
  ReducerStatus result;
  result.iterations = iterations_;
  result.buckets_reduced = buckets_reduced_;
  result.reduced_in_place = reduced_in_place_;
  result.has_rebuilt_buckets = has_rebuilt_;
  result.unused_parameters = unused_;
  result.ready_order = ready_order_;
  result.error = error_;
  for (const Bucket& bucket : buckets_) {
    result.bucket_bytes.push_back(bucket.bytes());
    result.bucket_indices.emplace_back();
    for (const GradientSlot& slot : bucket.slots()) result.bucket_indices.back().push_back(slot.parameter_index);
  }
  return result;
}

}  // namespace ours
