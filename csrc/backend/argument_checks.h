#pragma once

#include "backend/collective.h"
#include "collectives/op.h"

// Checks of the arguments of calls. They throw ValueError, which says what to pass instead. A `role` is the noun for a
// tensor in messages, such as "input".

namespace ours {

/// A rank that makes a call.
struct Caller {
  const char* call;  ///< the call's name in torch.distributed
  int rank;
  int size;

  size_t place() const { return static_cast<size_t>(rank); }
};

/// Checks that `tensor` is a dense tensor on the CPU or on a supported device.
void check_dense(const Caller& me, const at::Tensor& tensor, const char* role);

/// Also checks that no two elements of `tensor` share memory, since it is written to.
void check_output(const Caller& me, const at::Tensor& tensor, const char* role);

/// Checks a list that has one tensor for each rank, all of one dtype, to be read or to be written to.
void check_inputs(const Caller& me, const Tensors& list);
void check_outputs(const Caller& me, const Tensors& list);

void check_same_dtype(const Caller& me, const at::Tensor& output, const at::Tensor& input);

/// Checks an input, an output, and that both have the same dtype.
void check_pair(const Caller& me, const at::Tensor& output, const at::Tensor& input);

/// Checks that `whole` has as many elements as one of its parts has on all ranks together.
void check_parts(const Caller& me, const at::Tensor& whole, const at::Tensor& part, const char* whole_role);

/// Checks that this rank sends itself as many elements as it expects from itself, which its peers cannot check.
void check_own_part(const Caller& me, int64_t sent, int64_t expected);

/// Checks that two lists are as long as each other, and not empty.
void check_as_many(const Caller& me, const Tensors& outputs, const Tensors& inputs);

void check_list_size(const Caller& me, size_t size, const char* role);

/// Returns the root. `root_tensor` is an index for backends whose processes drive several devices.
int checked_root(const Caller& me, int64_t root, int64_t root_tensor = 0);

/// Returns the tensor of a list that must have exactly one.
const at::Tensor& only(const Caller& me, const Tensors& tensors, const char* role);

/// Returns the list of tensors that is the only one.
const Tensors& only_list(const Caller& me, const TensorLists& lists, const char* role);

/// Returns the device of all these tensors; the CPU if there are none.
at::Device common_device(const char* call, const Tensors& inputs, const TensorLists& outputs);

}  // namespace ours
