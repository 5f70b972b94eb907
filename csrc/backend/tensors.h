#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "collectives/group.h"
#include "common/dtype.h"

// The way from tensors to the memory that a Group reads and writes. All checks raise ValueError.

namespace ours {

/// Throws ValueError for types that cannot be moved as bytes (quantized types, and unknown types of several bytes).
DType dtype_of(const at::Tensor& tensor);

/// Checks that `tensor` is a dense tensor on the CPU or on a supported device. `call` and `role` are for the message,
/// for instance "all_reduce" and "the tensor".
void check_dense(const at::Tensor& tensor, const char* call, const char* role);

/// Calls check_dense() for every tensor, and checks that all have the same dtype.
void check_list(const std::vector<at::Tensor>& tensors, const char* call, const char* role);

/// Calls check_dense(), and checks that no two elements of `tensor` share memory.
void check_output(const at::Tensor& tensor, const char* call, const char* role);

void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* call);

/// The device of all these tensors; the CPU if there are none.
at::Device common_device(const char* call, const std::vector<at::Tensor>& inputs,
                         const std::vector<std::vector<at::Tensor>>& outputs);

/// The elements of `tensor` in logical order as contiguous memory: the tensor itself if it is contiguous already.
at::Tensor contiguous_source(const at::Tensor& tensor);

size_t bytes_of(const at::Tensor& tensor);
ConstSpan const_span(const at::Tensor& contiguous);
Span span(const at::Tensor& contiguous);

/// Divides a span into equal parts, one for each rank.
std::vector<ConstSpan> parts_of(ConstSpan whole, int parts);
std::vector<Span> parts_of(Span whole, int parts);

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

/// Copies without autograd's notice, like a write through a raw pointer.
void copy_below_autograd(const at::Tensor& to, const at::Tensor& from);

std::vector<Output> outputs_of(const std::vector<at::Tensor>& tensors);
std::vector<Span> spans_of(const std::vector<Output>& outputs);
void commit_all(const std::vector<Output>& outputs);

std::vector<at::Tensor> contiguous_sources(const std::vector<at::Tensor>& tensors);
std::vector<ConstSpan> const_spans_of(const std::vector<at::Tensor>& contiguous);

}  // namespace ours
