#include "backend/tensors.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "backend/device/devices.h"

namespace ours {

DType dtype_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBool:
      return DType::Bool;
    case at::kByte:
      return DType::UInt8;
    case at::kChar:
      return DType::Int8;
    case at::kUInt16:
      return DType::UInt16;
    case at::kShort:
      return DType::Int16;
    case at::kUInt32:
      return DType::UInt32;
    case at::kInt:
      return DType::Int32;
    case at::kUInt64:
      return DType::UInt64;
    case at::kLong:
      return DType::Int64;
    case at::kHalf:
      return DType::Float16;
    case at::kBFloat16:
      return DType::BFloat16;
    case at::kFloat:
      return DType::Float32;
    case at::kDouble:
      return DType::Float64;
    case at::kComplexHalf:
      return DType::Complex32;
    case at::kComplexFloat:
      return DType::Complex64;
    case at::kComplexDouble:
      return DType::Complex128;
    case at::kFloat8_e4m3fn:
      return DType::Float8E4M3FN;
    case at::kFloat8_e5m2:
      return DType::Float8E5M2;
    case at::kFloat8_e4m3fnuz:
      return DType::Float8E4M3FNUZ;
    case at::kFloat8_e5m2fnuz:
      return DType::Float8E5M2FNUZ;
    case at::kFloat8_e8m0fnu:
      return DType::Float8E8M0FNU;
    default:
      break;
  }
  if (!tensor.is_quantized() && tensor.element_size() == 1) return DType::Opaque8;
  C10_THROW_ERROR(ValueError, c10::str("tensors of type ", c10::toString(tensor.scalar_type()),
                                       " cannot be communicated; send tensor.int_repr() (quantized) or "
                                       "tensor.view(torch.uint8)"));
}

void check_dense(const at::Tensor& tensor, const char* call, const char* role) {
  TORCH_CHECK_VALUE(tensor.defined(), call, ": ", role, " is undefined; pass a tensor");
  TORCH_CHECK_VALUE(tensor.device().is_cpu() || serves_devices(tensor.device().type()), call, ": ", role, " is on ",
                    tensor.device(),
                    ", but this backend serves cpu and cuda; move it with .cpu(), or give its device a ",
                    "backend of its own, e.g. init_process_group(\"cpu:ours,xpu:xccl\")");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, call, ": ", role, " has layout ", tensor.layout(),
                    ", but only dense tensors can be passed; use .to_dense() (all_reduce also takes sparse_coo)");
}

void check_list(const std::vector<at::Tensor>& tensors, const char* call, const char* role) {
  for (const auto& tensor : tensors) {
    check_dense(tensor, call, role);
    TORCH_CHECK_VALUE(tensor.scalar_type() == tensors.front().scalar_type(), call, ": ", role, " are of types ",
                      tensors.front().scalar_type(), " and ", tensor.scalar_type(), "; convert them to one type");
  }
}

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

}  // namespace

void check_output(const at::Tensor& tensor, const char* call, const char* role) {
  check_dense(tensor, call, role);
  TORCH_CHECK_VALUE(is_free_of_overlap(tensor), call, ": ", role, " is written to, but several of its elements share ",
                    "memory (size ", tensor.sizes(), ", strides ", tensor.strides(),
                    "), as those of expanded tensors do; pass tensor.contiguous()");
}

void check_same_dtype(const at::Tensor& a, const at::Tensor& b, const char* call) {
  TORCH_CHECK_VALUE(a.scalar_type() == b.scalar_type(), call, ": output and input are of types ", a.scalar_type(),
                    " and ", b.scalar_type(), "; convert one of them");
}

at::Device common_device(const char* call, const std::vector<at::Tensor>& inputs,
                         const std::vector<std::vector<at::Tensor>>& outputs) {
  const at::Tensor* first = nullptr;
  const auto check = [&](const std::vector<at::Tensor>& tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (first == nullptr) first = &tensor;
      TORCH_CHECK_VALUE(tensor.device() == first->device(), call, ": the tensors are on ", first->device(), " and on ",
                        tensor.device(), "; move them to one device");
    }
  };
  check(inputs);
  for (const auto& tensors : outputs) check(tensors);
  return first == nullptr ? at::Device(at::kCPU) : first->device();
}

namespace {

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

}  // namespace

at::Tensor contiguous_source(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;
  at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

size_t bytes_of(const at::Tensor& tensor) { return tensor.nbytes(); }

ConstSpan const_span(const at::Tensor& contiguous) { return {contiguous.const_data_ptr(), bytes_of(contiguous)}; }

Span span(const at::Tensor& contiguous) { return {contiguous.mutable_data_ptr(), bytes_of(contiguous)}; }

std::vector<ConstSpan> parts_of(ConstSpan whole, int parts) {
  const size_t bytes = whole.bytes / static_cast<size_t>(parts);
  std::vector<ConstSpan> spans;
  for (int i = 0; i < parts; ++i) spans.push_back({static_cast<const char*>(whole.data) + i * bytes, bytes});
  return spans;
}

std::vector<Span> parts_of(Span whole, int parts) {
  const size_t bytes = whole.bytes / static_cast<size_t>(parts);
  std::vector<Span> spans;
  for (int i = 0; i < parts; ++i) spans.push_back({static_cast<char*>(whole.data) + i * bytes, bytes});
  return spans;
}

Output::Output(const at::Tensor& tensor, bool load) : tensor_(tensor), memory_(tensor) {
  if (is_plain(tensor)) return;
  memory_ =
      at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous).requires_grad(false));
  // A device needs this in any case: it loads the copy kernel, which may wait for all streams, before commit() runs it.
  if (load || !tensor.is_cpu()) copy_below_autograd(memory_, tensor);
}

Span Output::span() const { return ours::span(memory_); }

void Output::commit() const {
  if (!memory_.is_same(tensor_)) copy_below_autograd(tensor_, memory_);
}

void copy_below_autograd(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

std::vector<Output> outputs_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Output> outputs;
  outputs.reserve(tensors.size());
  for (const auto& tensor : tensors) outputs.emplace_back(tensor);
  return outputs;
}

std::vector<Span> spans_of(const std::vector<Output>& outputs) {
  std::vector<Span> spans;
  spans.reserve(outputs.size());
  for (const auto& output : outputs) spans.push_back(output.span());
  return spans;
}

void commit_all(const std::vector<Output>& outputs) {
  for (const auto& output : outputs) output.commit();
}

std::vector<at::Tensor> contiguous_sources(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> sources;
  sources.reserve(tensors.size());
  for (const auto& tensor : tensors) sources.push_back(contiguous_source(tensor));
  return sources;
}

std::vector<ConstSpan> const_spans_of(const std::vector<at::Tensor>& contiguous) {
  std::vector<ConstSpan> spans;
  spans.reserve(contiguous.size());
  for (const auto& tensor : contiguous) spans.push_back(const_span(tensor));
  return spans;
}

}  // namespace ours
