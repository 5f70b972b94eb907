#include "backend/tensors.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <utility>

namespace ours {

namespace {

constexpr std::pair<at::ScalarType, DType> kTypes[] = {
    {at::kFloat, DType::Float32},
    {at::kBFloat16, DType::BFloat16},
    {at::kHalf, DType::Float16},
    {at::kDouble, DType::Float64},
    {at::kLong, DType::Int64},
    {at::kInt, DType::Int32},
    {at::kByte, DType::UInt8},
    {at::kBool, DType::Bool},
    {at::kChar, DType::Int8},
    {at::kShort, DType::Int16},
    {at::kUInt16, DType::UInt16},
    {at::kUInt32, DType::UInt32},
    {at::kUInt64, DType::UInt64},
    {at::kComplexHalf, DType::Complex32},
    {at::kComplexFloat, DType::Complex64},
    {at::kComplexDouble, DType::Complex128},
    {at::kFloat8_e4m3fn, DType::Float8E4M3FN},
    {at::kFloat8_e5m2, DType::Float8E5M2},
    {at::kFloat8_e4m3fnuz, DType::Float8E4M3FNUZ},
    {at::kFloat8_e5m2fnuz, DType::Float8E5M2FNUZ},
    {at::kFloat8_e8m0fnu, DType::Float8E8M0FNU},
};

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

template <class AnySpan, class Byte>
std::vector<AnySpan> equal_parts(AnySpan whole, Byte* first, int parts) {
  const size_t bytes = whole.bytes / static_cast<size_t>(parts);
  std::vector<AnySpan> spans;
  for (int i = 0; i < parts; ++i) spans.push_back({first + i * bytes, bytes});
  return spans;
}

}  // namespace

DType dtype_of(const at::Tensor& tensor) {
  for (const auto& [torch, ours] : kTypes) {
    if (torch == tensor.scalar_type()) return ours;
  }
  if (!tensor.is_quantized() && tensor.element_size() == 1) return DType::Opaque8;
  C10_THROW_ERROR(ValueError, c10::str("tensors of type ", c10::toString(tensor.scalar_type()),
                                       " cannot be communicated; send tensor.int_repr() (quantized) or "
                                       "tensor.view(torch.uint8)"));
}

at::Tensor contiguous_source(const at::Tensor& tensor) {
  if (is_plain(tensor)) return tensor;
  at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.resolve_conj().resolve_neg().contiguous();
}

std::vector<at::Tensor> contiguous_sources(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> sources;
  sources.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) sources.push_back(contiguous_source(tensor));
  return sources;
}

uint64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  uint64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += (tensor.is_sparse() ? tensor._values() : tensor).nbytes();
  return bytes;
}

ConstSpan const_span(const at::Tensor& contiguous) { return {contiguous.const_data_ptr(), contiguous.nbytes()}; }

Span span(const at::Tensor& contiguous) { return {contiguous.mutable_data_ptr(), contiguous.nbytes()}; }

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

std::vector<Output> outputs_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Output> outputs;
  outputs.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) outputs.emplace_back(tensor);
  return outputs;
}

std::vector<Span> spans_of(const std::vector<Output>& outputs) {
  std::vector<Span> spans;
  spans.reserve(outputs.size());
  for (const Output& output : outputs) spans.push_back(output.span());
  return spans;
}

void commit_all(const std::vector<Output>& outputs) {
  for (const Output& output : outputs) output.commit();
}

std::vector<ConstSpan> rank_spans(const std::vector<at::Tensor>& contiguous, int ranks) {
  if (contiguous.size() == 1) {
    const ConstSpan whole = const_span(contiguous.front());
    return equal_parts(whole, static_cast<const char*>(whole.data), ranks);
  }
  std::vector<ConstSpan> spans;
  spans.reserve(contiguous.size());
  for (const at::Tensor& tensor : contiguous) spans.push_back(const_span(tensor));
  return spans;
}

std::vector<Span> rank_spans(const std::vector<Output>& outputs, int ranks) {
  if (outputs.size() != 1) return spans_of(outputs);
  const Span whole = outputs.front().span();
  return equal_parts(whole, static_cast<char*>(whole.data), ranks);
}

void copy_below_autograd(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(from);
}

}  // namespace ours
