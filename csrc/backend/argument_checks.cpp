#include "backend/argument_checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "backend/device/devices.h"

namespace ours {

namespace {

/// Whether strides alone prove that no two elements share memory.
bool is_free_of_overlap(const at::Tensor& tensor) {
  if (tensor.numel() <= 1) return true;
  switch (at::has_internal_overlap(tensor)) {
    case at::MemOverlap::No:
      return true;
    case at::MemOverlap::Yes:
      return false;
    default:
      break;
  }
  std::vector<int64_t> order(static_cast<size_t>(tensor.dim()));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return tensor.stride(a) < tensor.stride(b); });
  int64_t reach = 0;  // the farthest element of the dimensions seen so far
  for (const int64_t dim : order) {
    if (tensor.size(dim) == 1) continue;
    if (tensor.stride(dim) <= reach) return false;
    reach += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return true;
}

void check_list(const Caller& me, const Tensors& list, const char* role) {
  check_list_size(me, list.size(), role);
  for (const at::Tensor& tensor : list) {
    check_dense(me, tensor, role);
    TORCH_CHECK_VALUE(tensor.scalar_type() == list.front().scalar_type(), me.call, ": the ", role, "s are of types ",
                      list.front().scalar_type(), " and ", tensor.scalar_type(), "; convert them to one type");
  }
}

}  // namespace

void check_dense(const Caller& me, const at::Tensor& tensor, const char* role) {
  TORCH_CHECK_VALUE(tensor.defined(), me.call, ": the ", role, " is undefined; pass a tensor");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || serves_devices(tensor.device().type()), me.call, ": the ", role,
                    " is on ", tensor.device(),
                    ", but this backend serves cpu and cuda; move it with .cpu(), or give its device a ",
                    "backend of its own, e.g. init_process_group(\"cpu:ours,xpu:xccl\")");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, me.call, ": the ", role, " has layout ", tensor.layout(),
                    ", but only dense tensors can be passed; use .to_dense() (all_reduce also takes sparse_coo)");
}

void check_output(const Caller& me, const at::Tensor& tensor, const char* role) {
  check_dense(me, tensor, role);
  TORCH_CHECK_VALUE(is_free_of_overlap(tensor), me.call, ": the ", role,
                    " is written to, but several of its elements share memory (size ", tensor.sizes(), ", strides ",
                    tensor.strides(), "), as those of expanded tensors do; pass tensor.contiguous()");
}

void check_inputs(const Caller& me, const Tensors& list) { check_list(me, list, "input"); }

void check_outputs(const Caller& me, const Tensors& list) {
  check_list(me, list, "output");
  for (const at::Tensor& tensor : list) check_output(me, tensor, "output");
}

void check_same_dtype(const Caller& me, const at::Tensor& output, const at::Tensor& input) {
  TORCH_CHECK_VALUE(output.scalar_type() == input.scalar_type(), me.call, ": output and input are of types ",
                    output.scalar_type(), " and ", input.scalar_type(), "; convert one of them");
}

void check_pair(const Caller& me, const at::Tensor& output, const at::Tensor& input) {
  check_dense(me, input, "input");
  check_output(me, output, "output");
  check_same_dtype(me, output, input);
}

void check_parts(const Caller& me, const at::Tensor& whole, const at::Tensor& part, const char* whole_role) {
  const int64_t needed = part.numel() * me.size;
  TORCH_CHECK_VALUE(whole.numel() == needed, me.call, ": the ", whole_role, " has ", whole.numel(),
                    " elements, but a group of ", me.size, " ranks with ", part.numel(), " elements each needs ",
                    needed);
}

void check_own_part(const Caller& me, int64_t sent, int64_t expected) {
  TORCH_CHECK_VALUE(sent == expected, me.call, ": rank ", me.rank, "'s own part has ", sent,
                    " elements in the input but ", expected, " in the output; make the sizes equal");
}

void check_as_many(const Caller& me, const Tensors& outputs, const Tensors& inputs) {
  TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), me.call, ": got ", outputs.size(),
                    " outputs and ", inputs.size(), " inputs; pass equally many, and at least one of each");
}

void check_list_size(const Caller& me, size_t size, const char* role) {
  TORCH_CHECK_VALUE(size == static_cast<size_t>(me.size), me.call, ": the ", role, " list has ", size,
                    " tensors, but the group has ", me.size, " ranks; pass one tensor per rank");
}

int checked_root(const Caller& me, int64_t root, int64_t root_tensor) {
  TORCH_CHECK_VALUE(root >= 0 && root < me.size, me.call, ": root is ", root, " in a group of ", me.size,
                    " ranks; give a rank of the group, 0 to ", me.size - 1);
  TORCH_CHECK_VALUE(root_tensor == 0, me.call, ": rootTensor is ", root_tensor, "; with one tensor it must be 0");
  return static_cast<int>(root);
}

const at::Tensor& only(const Caller& me, const Tensors& tensors, const char* role) {
  TORCH_CHECK_VALUE(tensors.size() == 1, me.call, ": expected one tensor as ", role, " but got ", tensors.size(),
                    "; lists with one tensor per device are not supported");
  return tensors.front();
}

const Tensors& only_list(const Caller& me, const TensorLists& lists, const char* role) {
  TORCH_CHECK_VALUE(lists.size() == 1, me.call, ": expected one list of ", role, "s but got ", lists.size());
  return lists.front();
}

at::Device common_device(const char* call, const Tensors& inputs, const TensorLists& outputs) {
  const at::Tensor* first = nullptr;
  const auto check = [&](const Tensors& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (first == nullptr) first = &tensor;
      TORCH_CHECK_VALUE(tensor.device() == first->device(), call, ": the tensors are on ", first->device(), " and on ",
                        tensor.device(), "; move them to one device");
    }
  };
  check(inputs);
  for (const Tensors& tensors : outputs) check(tensors);
  return first == nullptr ? at::Device(at::kCPU) : first->device();
}

}  // namespace ours
