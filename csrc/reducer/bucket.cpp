#include "reducer/bucket.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include "reducer/gradient_copy.h"
#include "reducer/group_reductions.h"

namespace ours {

Bucket::Bucket(const std::vector<size_t>& parameter_indices, const std::vector<at::Tensor>& parameters, bool sparse,
               std::optional<at::ScalarType> reduce_dtype)
    : sparse_(sparse) {
  TORCH_CHECK(!parameter_indices.empty(), "A bucket needs at least one parameter.");
  TORCH_CHECK(!sparse || parameter_indices.size() == 1, "A sparse gradient must have a bucket of its own.");
  const at::Tensor& first = parameters.at(parameter_indices.front());
  options_ = first.options().requires_grad(false).memory_format(std::nullopt);
  if (reduce_dtype) options_ = options_.dtype(*reduce_dtype);
  complex_ = c10::isComplexType(c10::typeMetaToScalarType(options_.dtype()));
  for (const size_t index : parameter_indices) {
    GradientSlot slot;
    slot.parameter_index = index;
    slot.parameter = parameters.at(index);
    TORCH_CHECK(slot.parameter.device() == first.device() && slot.parameter.scalar_type() == first.scalar_type(),
                "Parameters ", parameter_indices.front(), " and ", index,
                " cannot share a bucket: they differ in dtype or device.");
    slot.offset = static_cast<size_t>(numel_);
    slot.strides = slot.parameter.is_non_overlapping_and_dense() ? c10::DimVector(slot.parameter.strides())
                                                                 : c10::contiguous_strides(slot.parameter.sizes());
    numel_ += slot.parameter.numel();
    slots_.push_back(std::move(slot));
  }
  bytes_ = numel_ * static_cast<int64_t>(options_.dtype().itemsize());
  reset();
}

void Bucket::set_tail(int64_t numbers) {
  TORCH_INTERNAL_ASSERT(!sparse_ && !buffer_.defined());
  tail_numbers_ = numbers;
  tail_ = complex_ ? (numbers + 1) / 2 : numbers;
}

void Bucket::reset() {
  pending_ = slots_.size();
  deferred.clear();
  streams.clear();
  for (GradientSlot& slot : slots_) slot.in_place.reset();
  work.reset();
  future.reset();
  end_stamp.reset();
  times = {};
}

void Bucket::note_arrival(int64_t now) {
  if (times.first_gradient < 0) times.first_gradient = now;
  times.last_gradient = now;
}

bool Bucket::mark_arrived(int64_t now) {
  TORCH_INTERNAL_ASSERT(pending_ > 0);
  note_arrival(now);
  return --pending_ == 0;
}

void Bucket::allocate(c10d::ProcessGroup& group, bool whole) {
  if (sparse_ || (buffer_.defined() && whole_ == whole)) return;
  release();
  whole_ = whole;
  const auto shares = [whole](const GradientSlot& slot) { return whole || slot.bytes() < kLeastInPlaceBytes; };
  int64_t shared = tail_;
  for (const GradientSlot& slot : slots_) shared += shares(slot) ? slot.parameter.numel() : 0;
  buffer_ = shared == 0 ? at::empty({0}, options_) : allocate_buffer(group, shared, options_);
  int64_t begin = 0;
  for (GradientSlot& slot : slots_) {
    if (!shares(slot)) continue;
    slot.result = slot.view = slot.shaped(buffer_.narrow(0, begin, slot.parameter.numel()));
    begin += slot.parameter.numel();
  }
}

void Bucket::place(c10d::ProcessGroup& group, GradientSlot& slot) {
  if (slot.view.defined()) return;
  slot.result = slot.view = slot.shaped(allocate_buffer(group, slot.parameter.numel(), options_));
}

void Bucket::release() {
  buffer_.reset();
  for (GradientSlot& slot : slots_) {
    slot.view.reset();
    slot.result.reset();
  }
}

at::Tensor Bucket::buffer_to_reduce() const { return complex_ && !sparse_ ? at::view_as_real(buffer_) : buffer_; }

at::Tensor Bucket::tail() const {
  const at::Tensor tail = buffer_.narrow(0, buffer_.numel() - tail_, tail_);
  return complex_ ? at::view_as_real(tail).flatten().narrow(0, 0, tail_numbers_) : tail;
}

at::Tensor Bucket::zeros_to_reduce() const {
  if (sparse_) return empty_sparse_gradient(slots_.front().parameter);
  const at::Tensor zeros = at::zeros({numel_ + tail_}, options_);
  return complex_ ? at::view_as_real(zeros) : zeros;
}

std::vector<at::Tensor> Bucket::pieces_to_reduce() const {
  if (whole_) return {buffer_to_reduce()};
  std::vector<at::Tensor> pieces;
  int64_t begin = 0;  // the stretch of the buffer that no piece contains yet
  int64_t end = 0;
  const auto add = [&](const at::Tensor& elements) {
    pieces.push_back(complex_ ? at::view_as_real(elements) : elements);
  };
  const auto add_shared = [&] {
    if (end > begin) add(buffer_.narrow(0, begin, end - begin));
    begin = end;
  };
  for (const GradientSlot& slot : slots_) {
    if (!slot.in_place.defined() && slot.view.is_alias_of(buffer_)) {
      end += slot.parameter.numel();
      continue;
    }
    add_shared();
    add(slot.in_place.defined() ? slot.in_place : slot.view.as_strided({slot.parameter.numel()}, {1}));
  }
  end += tail_;
  add_shared();
  // A bucket without elements is reduced too, because the peers count the reductions.
  if (pieces.empty()) pieces.push_back(buffer_to_reduce());
  return pieces;
}

void Bucket::set_result(const at::Tensor& reduced) {
  if (sparse_) {
    if (!reduced.is_same(buffer_)) buffer_.copy_(reduced);
    return;
  }
  TORCH_CHECK(reduced.numel() == numel_ * (complex_ && reduced.is_floating_point() ? 2 : 1),
              "The communication hook returned a tensor of ", reduced.numel(), " elements for a bucket of ", numel_,
              ". Its future must hold one tensor of the shape of bucket.buffer().");
  // Usually it was reduced in place, and the results are the views that exist already.
  const bool in_place = reduced.data_ptr() == buffer_.data_ptr() && reduced.dtype() == buffer_.dtype();
  const at::Tensor flat = in_place || !complex_ || !reduced.is_floating_point()
                              ? reduced.reshape({-1})
                              : at::view_as_complex(reduced.reshape({-1, 2}));
  for (GradientSlot& slot : slots_) {
    slot.result =
        in_place ? slot.view : slot.shaped(flat.narrow(0, static_cast<int64_t>(slot.offset), slot.parameter.numel()));
  }
}

c10d::GradBucket Bucket::grad_bucket(size_t index, size_t count, at::Tensor tensor) const {
  std::vector<size_t> offsets;
  std::vector<size_t> lengths;
  std::vector<c10::IntArrayRef> sizes;
  std::vector<at::Tensor> parameters;
  for (const GradientSlot& slot : slots_) {
    if (!sparse_) {
      offsets.push_back(slot.offset);
      lengths.push_back(static_cast<size_t>(slot.parameter.numel()));
      sizes.push_back(slot.parameter.sizes());
    }
    parameters.push_back(slot.parameter);
  }
  return c10d::GradBucket(index, count, std::move(tensor), std::move(offsets), std::move(lengths), std::move(sizes),
                          std::move(parameters), std::nullopt);
}

}  // namespace ours
