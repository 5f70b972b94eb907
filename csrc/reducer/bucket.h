#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/ScalarType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/DimVector.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "reducer/device_streams.h"
#include "reducer/overlap.h"

namespace ours {

/// Gradients of at least this size can be reduced where they lie. A smaller one is copied in less time than a piece
/// of its own takes.
constexpr size_t kLeastInPlaceBytes = 32 * 1024;

/// One gradient's place in a bucket.
struct GradientSlot {
  size_t parameter_index = 0;
  at::Tensor parameter;
  /// In elements of the bucket.
  size_t offset = 0;
  /// The gradient's strides, as autograd lays it out: the parameter's if those are dense, otherwise row-major.
  c10::DimVector strides;
  /// Where the gradient is written: a part of the buffer, or memory of its own.
  at::Tensor view;
  /// Where the reduced gradient is read: `view`, unless a communication hook returned a tensor of its own.
  at::Tensor result;
  /// The elements of the gradient itself in the order of memory, in one dimension, if it is reduced where it lies.
  at::Tensor in_place;
  uint32_t in_place_version = 0;  ///< autograd's count of changes when its reduction began
  /// This rank did not use the parameter: its gradient must stay as it is if no other rank did either.
  bool kept = false;

  size_t bytes() const { return parameter.nbytes(); }
  /// Whether `gradient` has the type and layout of the view.
  bool fits(const at::Tensor& gradient) const {
    return gradient.layout() == at::kStrided && gradient.scalar_type() == parameter.scalar_type() &&
           gradient.device() == parameter.device() && gradient.sizes() == parameter.sizes() &&
           gradient.strides() == c10::IntArrayRef(strides) && !gradient.is_conj() && !gradient.is_neg();
  }
  /// Returns `elements`, all of them in one dimension, in the gradient's shape.
  at::Tensor shaped(const at::Tensor& elements) const {
    return elements.as_strided(parameter.sizes(), strides, elements.storage_offset());
  }
  /// A tensor for `.grad` that shares the view's memory. Setting its `.data` leaves the view alone.
  at::Tensor gradient_view() const { return view.tensor_data(); }
};

/// The time at which a reduction ended, or -1 before that. A callback on another thread writes it, and shares it
/// because the callback may outlive the bucket.
using EndStamp = std::shared_ptr<std::atomic<int64_t>>;

/// A gradient that waits to be copied into its slot.
struct DeferredGradient {
  size_t slot = 0;
  at::Tensor gradient;
};

/// Gradients that are reduced together: which of them have arrived, and the memory that they travel in.
class Bucket {
 public:
  /// A bucket for `parameters`, all of one dtype and device, as chosen by bucket assignment. `reduce_dtype`, if given,
  /// is the dtype of the buffer instead of the parameters'. A sparse bucket has one parameter and no buffer of its own.
  Bucket(const std::vector<size_t>& parameter_indices, const std::vector<at::Tensor>& parameters, bool sparse,
         std::optional<at::ScalarType> reduce_dtype);

  /// Has `numbers` real numbers more travel with the gradients, at the end. Before there is a buffer.
  void set_tail(int64_t numbers);

  // Readiness.

  void reset();
  /// Notes only the time of an arrival.
  void note_arrival(int64_t now);
  /// Notes that one more gradient has arrived; returns whether it was the last one.
  bool mark_arrived(int64_t now);
  bool ready() const { return pending_ == 0; }

  // The buffer.

  /// Makes the memory that gradients are copied into, unless it exists; see allocate_buffer(). Its contents are
  /// undefined. With `whole` it is a flat buffer, and every slot's view a part of it. Otherwise only gradients below
  /// kLeastInPlaceBytes have their place there, side by side. Most of the others are never copied, so place() makes
  /// memory for them when it is needed.
  void allocate(c10d::ProcessGroup& group, bool whole);
  /// Makes the view of a slot, if it has none yet.
  void place(c10d::ProcessGroup& group, GradientSlot& slot);
  /// Drops that memory. Gradients that are views of it keep it alive.
  void release();
  bool allocated() const { return buffer_.defined(); }
  /// The flat buffer of a bucket that is whole, or the one sparse gradient.
  const at::Tensor& buffer() const { return buffer_; }
  /// The real numbers at the end of the buffer, which is allocated.
  at::Tensor tail() const;
  bool has_tail() const { return tail_ > 0; }
  void set_sparse_gradient(at::Tensor gradient) { buffer_ = std::move(gradient); }
  /// The buffer as collectives take it, with complex numbers as pairs of reals.
  at::Tensor buffer_to_reduce() const;
  /// The same elements in the same order, from wherever each gradient is to be reduced, or the one sparse gradient, and
  /// the tail. All slots must have a place.
  std::vector<at::Tensor> pieces_to_reduce() const;
  /// Takes what a reduction of buffer_to_reduce() returned for the slots' results. RuntimeError if its size is wrong.
  void set_result(const at::Tensor& reduced);

  /// New zeros like what buffer_to_reduce() returns.
  at::Tensor zeros_to_reduce() const;

  bool sparse() const { return sparse_; }
  at::ScalarType dtype() const { return c10::typeMetaToScalarType(options_.dtype()); }
  c10::Device device() const { return slots_.front().parameter.device(); }
  int64_t bytes() const { return bytes_; }
  std::vector<GradientSlot>& slots() { return slots_; }
  const std::vector<GradientSlot>& slots() const { return slots_; }

  /// Describes this bucket, which is the one with `index` of `count` and travels as `tensor`, for communication hooks.
  c10d::GradBucket grad_bucket(size_t index, size_t count, at::Tensor tensor) const;

  // The reduction in flight: a hook returns a future, and the process group a Work.

  c10::intrusive_ptr<c10d::Work> work;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  /// The gradients to be copied at once.
  std::vector<DeferredGradient> deferred;
  /// The streams in which gradients were computed.
  StreamSet streams;
  EndStamp end_stamp;
  BucketTimes times;

 private:
  bool sparse_;
  bool whole_ = true;
  bool complex_ = false;
  size_t pending_ = 0;
  int64_t numel_ = 0;
  int64_t bytes_ = 0;
  int64_t tail_ = 0;          ///< in elements of the buffer, at its end
  int64_t tail_numbers_ = 0;  ///< the same in real numbers; half an element may be left over
  at::TensorOptions options_;
  at::Tensor buffer_;
  std::vector<GradientSlot> slots_;
};

}  // namespace ours
