#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "collectives/spans.h"
#include "common/dtype.h"

// The way from tensors to the memory that a Group reads and writes.

namespace ours {

/// Throws ValueError for types that cannot be moved as bytes (quantized types, and unknown types of several bytes).
DType dtype_of(const at::Tensor& tensor);

/// The elements of `tensor` in logical order as contiguous memory: the tensor itself if it is contiguous already.
at::Tensor contiguous_source(const at::Tensor& tensor);
std::vector<at::Tensor> contiguous_sources(const std::vector<at::Tensor>& tensors);

/// The bytes of the elements of all; those of a sparse tensor are its values.
uint64_t bytes_of(const std::vector<at::Tensor>& tensors);
ConstSpan const_span(const at::Tensor& contiguous);
Span span(const at::Tensor& contiguous);

/// Contiguous memory for a tensor's new elements. If the tensor's own memory is unsuitable (strides, lazy conjugation),
/// commit() copies the elements over.
class Output {
 public:
  Output() = default;

  /// Memory for all of `tensor`; with `load` it starts with the present elements.
  explicit Output(const at::Tensor& tensor, bool load = false);

  const at::Tensor& memory() const { return memory_; }
  Span span() const;
  void commit() const;

 private:
  at::Tensor tensor_;
  at::Tensor memory_;
};

std::vector<Output> outputs_of(const std::vector<at::Tensor>& tensors);
std::vector<Span> spans_of(const std::vector<Output>& outputs);
void commit_all(const std::vector<Output>& outputs);

/// A span for each rank: those of the tensors, or the equal parts of a single tensor. None if there is no tensor.
std::vector<ConstSpan> rank_spans(const std::vector<at::Tensor>& contiguous, int ranks);
std::vector<Span> rank_spans(const std::vector<Output>& outputs, int ranks);

/// Copies without autograd's notice, like a write through a raw pointer.
void copy_below_autograd(const at::Tensor& to, const at::Tensor& from);

}  // namespace ours
