#include "backend/symmetric/symmetric_ops.h"

#include <torch/version.h>

#if TORCH_VERSION_MINOR >= 15

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>
#include <utility>
#include <vector>

#include "backend/errors.h"
#include "backend/tensors.h"
#include "common/partition.h"
#include "kernels/reduce.h"

namespace ours {

namespace {

namespace symm = c10d::symmetric_memory;

/// A tensor in symmetric memory, as all ranks have it at the same place of theirs.
class Symmetric {
 public:
  Symmetric(const char* op, const at::Tensor& tensor, const std::string& group)
      : handle_(symm::rendezvous(tensor, group)), bytes_(tensor.element_size()), dtype_(dtype_of(tensor)) {
    TORCH_CHECK_VALUE(handle_, op,
                      ": the tensor is not in symmetric memory; allocate it with "
                      "torch.distributed._symmetric_memory.empty(..., device=\"cpu\")");
    TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": the tensor is not contiguous");
    const auto offset = static_cast<size_t>(tensor.storage_offset()) * bytes_;
    for (void* const buffer : handle_->get_buffer_ptrs()) data_.push_back(static_cast<std::byte*>(buffer) + offset);
  }

  int rank() const { return handle_->get_rank(); }
  int size() const { return handle_->get_world_size(); }
  /// The element of that number in a rank's tensor.
  std::byte* at(int rank, int64_t element) const {
    return data_[static_cast<size_t>(rank)] + static_cast<size_t>(element) * bytes_;
  }
  std::byte* own(int64_t element) const { return at(rank(), element); }
  size_t bytes_of(int64_t elements) const { return static_cast<size_t>(elements) * bytes_; }

  /// Until they have called it, no rank has changed its tensor; once they have, each may.
  void barrier() const { handle_->barrier(0, 0); }

  /// Reduces `count` elements of all ranks, from element `first` on, in the order of the ranks.
  void reduce(void* to, int64_t first, int64_t count, ReduceKind kind = ReduceKind::Sum) const {
    if (count == 0) return;
    std::vector<const void*> sources;
    for (int r = 0; r < size(); ++r) sources.push_back(at(r, first));
    ours::reduce(to, sources.data(), size(), static_cast<size_t>(count), dtype_, Reduction{kind, size()});
  }

 private:
  const c10::intrusive_ptr<symm::SymmetricMemory> handle_;
  const size_t bytes_;
  const DType dtype_;
  std::vector<std::byte*> data_;
};

/// Throws the same error on all ranks, which call it with the same arguments, before any of them waits.
void check_reduction(const char* op, const at::Tensor& tensor, ReduceKind kind) {
  TORCH_CHECK_VALUE(tensor.is_cpu(), op, ": the tensor is on ", tensor.device());
  with_torch_errors("", [&] { check_supported(kind, dtype_of(tensor)); });
}

void check_sum(const char* op, const at::Tensor& tensor, const std::string& reduce_op) {
  TORCH_CHECK_VALUE(reduce_op == "sum", op, ": the reduction is '", reduce_op, "', and only 'sum' is possible");
  check_reduction(op, tensor, ReduceKind::Sum);
}

void check_output(const char* op, const at::Tensor& out, const at::Tensor& like, int64_t elements) {
  const bool fits = out.is_cpu() && out.is_contiguous() && out.scalar_type() == like.scalar_type();
  TORCH_CHECK_VALUE(fits && out.numel() == elements, op, ": the output has to be a contiguous tensor on the CPU of ",
                    elements, " elements of ", like.scalar_type(), ", but has ", out.numel(), " of ",
                    out.scalar_type());
}

// ---- all-reduce

at::Tensor one_shot_all_reduce_out(const at::Tensor& input, std::string reduce_op, std::string group, at::Tensor out) {
  constexpr const char* kOp = "one_shot_all_reduce";
  check_sum(kOp, input, reduce_op);
  check_output(kOp, out, input, input.numel());
  const Symmetric all(kOp, input, group);
  all.barrier();
  all.reduce(out.mutable_data_ptr(), 0, input.numel());
  all.barrier();
  return out;
}

at::Tensor one_shot_all_reduce(const at::Tensor& input, std::string reduce_op, std::string group) {
  return one_shot_all_reduce_out(input, std::move(reduce_op), std::move(group), at::empty_like(input));
}

at::Tensor one_shot_all_reduce_copy_out(const at::Tensor& symm_buffer, const at::Tensor& local_input,
                                        std::string reduce_op, std::string group, at::Tensor out) {
  TORCH_CHECK_VALUE(symm_buffer.numel() >= local_input.numel(), "one_shot_all_reduce_copy: the buffer has ",
                    symm_buffer.numel(), " elements, and the input ", local_input.numel());
  at::Tensor part = symm_buffer.flatten().narrow(0, 0, local_input.numel());
  part.copy_(local_input.flatten());
  return one_shot_all_reduce_out(part, std::move(reduce_op), std::move(group), std::move(out));
}

at::Tensor one_shot_all_reduce_copy(const at::Tensor& symm_buffer, const at::Tensor& local_input, std::string reduce_op,
                                    std::string group) {
  at::Tensor out = at::empty_like(local_input, local_input.options(), at::MemoryFormat::Contiguous);
  return one_shot_all_reduce_copy_out(symm_buffer, local_input, std::move(reduce_op), std::move(group), out);
}

/// Each rank reduces a slice. With `out`, that stays in its input, and goes from there to the outputs of all.
void two_shot(const char* op, const at::Tensor& input, const std::string& group, const at::Tensor* out) {
  const Symmetric all(op, input, group);
  // For each rank: its slice's first element, and the number of elements.
  const auto part_of = [&](int r) {
    const Slice part = slice_of(static_cast<size_t>(input.numel()), all.size(), r);
    return std::make_pair(static_cast<int64_t>(part.begin), static_cast<int64_t>(part.size()));
  };
  const auto [begin, count] = part_of(all.rank());
  all.barrier();
  all.reduce(all.own(begin), begin, count);
  if (out == nullptr) {
    for (int r = 0; r < all.size(); ++r) {
      if (r != all.rank() && count > 0) std::memcpy(all.at(r, begin), all.own(begin), all.bytes_of(count));
    }
  } else {
    all.barrier();
    auto* const to = static_cast<std::byte*>(out->mutable_data_ptr());
    for (int r = 0; r < all.size(); ++r) {
      const auto [first, elements] = part_of(r);
      if (elements > 0) std::memcpy(to + all.bytes_of(first), all.at(r, first), all.bytes_of(elements));
    }
  }
  all.barrier();
}

at::Tensor two_shot_all_reduce_(at::Tensor input, std::string reduce_op, std::string group) {
  check_sum("two_shot_all_reduce_", input, reduce_op);
  two_shot("two_shot_all_reduce_", input, group, nullptr);
  return input;
}

at::Tensor two_shot_all_reduce_out(at::Tensor input, std::string reduce_op, std::string group, at::Tensor out) {
  constexpr const char* kOp = "two_shot_all_reduce_out";
  check_sum(kOp, input, reduce_op);
  check_output(kOp, out, input, input.numel());
  two_shot(kOp, input, group, &out);
  return out;
}

// ---- reduce-scatter and all-gather

/// Rank r gets part r of the first dimension, or of the last one.
void reduce_scatter(const Symmetric& all, const at::Tensor& input, bool split_last_dim, at::Tensor& out,
                    ReduceKind kind) {
  const int64_t rows = split_last_dim ? input.numel() / std::max<int64_t>(input.size(-1), 1) : 1;
  const int64_t width = rows == 0 ? 0 : input.numel() / rows;
  const int64_t part = width / all.size();
  auto* const to = static_cast<std::byte*>(out.mutable_data_ptr());
  all.barrier();
  for (int64_t row = 0; row < rows; ++row) {
    all.reduce(to + all.bytes_of(row * part), row * width + all.rank() * part, part, kind);
  }
  all.barrier();
}

at::Tensor reduce_scatter_out(at::Tensor input, std::string group, bool split_last_dim, at::Tensor out) {
  constexpr const char* kOp = "reduce_scatter_out";
  check_reduction(kOp, input, ReduceKind::Sum);
  const Symmetric all(kOp, input, group);
  TORCH_CHECK_VALUE(input.dim() >= 1, kOp, ": the input has no dimension to split");
  const int64_t length = input.size(split_last_dim ? -1 : 0);
  TORCH_CHECK_VALUE(length % all.size() == 0, kOp, ": the dimension of ", length, " is not divisible by the ",
                    all.size(), " ranks");
  check_output(kOp, out, input, input.numel() / all.size());
  reduce_scatter(all, input, split_last_dim, out, ReduceKind::Sum);
  return out;
}

std::vector<int64_t> with_first(at::IntArrayRef sizes, int64_t first) {
  std::vector<int64_t> changed = sizes.vec();
  changed.at(0) = first;
  return changed;
}

at::Tensor low_contention_reduce_scatter(at::Tensor tensor, std::string reduce_op, std::string group) {
  constexpr const char* kOp = "_low_contention_reduce_scatter";
  TORCH_CHECK_VALUE(reduce_op == "sum" || reduce_op == "avg", kOp, ": the reduction is '", reduce_op,
                    "', and only 'sum' and 'avg' are possible");
  const ReduceKind kind = reduce_op == "sum" ? ReduceKind::Sum : ReduceKind::Avg;
  check_reduction(kOp, tensor, kind);
  const auto ranks = c10d::resolve_process_group(group);
  TORCH_CHECK_VALUE(tensor.dim() >= 1 && tensor.size(0) % ranks->getSize() == 0, kOp, ": a tensor of ", tensor.sizes(),
                    " cannot be split among ", ranks->getSize(), " ranks");
  at::Tensor out = at::empty(with_first(tensor.sizes(), tensor.size(0) / ranks->getSize()), tensor.options());
  if (symm::is_symm_mem_tensor(tensor)) {
    reduce_scatter(Symmetric(kOp, tensor, group), tensor, false, out, kind);
    return out;
  }
  at::Tensor input = tensor.contiguous();
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduce_op == "sum" ? c10d::ReduceOp::SUM : c10d::ReduceOp::AVG;
  ranks->reduce_scatter_single(out, input, options)->wait();
  return out;
}

at::Tensor low_contention_all_gather(at::Tensor tensor, std::string group) {
  constexpr const char* kOp = "_low_contention_all_gather";
  const auto ranks = c10d::resolve_process_group(group);
  TORCH_CHECK_VALUE(tensor.dim() >= 1, kOp, ": the tensor has no dimension along which to gather");
  at::Tensor out = at::empty(with_first(tensor.sizes(), tensor.size(0) * ranks->getSize()), tensor.options());
  if (!symm::is_symm_mem_tensor(tensor)) {
    at::Tensor input = tensor.contiguous();
    ranks->all_gather_single(out, input)->wait();
    return out;
  }
  const Symmetric all(kOp, tensor, group);
  auto* const to = static_cast<std::byte*>(out.mutable_data_ptr());
  const size_t bytes = all.bytes_of(tensor.numel());
  all.barrier();
  for (int r = 0; r < all.size() && bytes > 0; ++r)
    std::memcpy(to + static_cast<size_t>(r) * bytes, all.at(r, 0), bytes);
  all.barrier();
  return out;
}

// ---- words

at::Tensor memset32_(at::Tensor& input, int64_t offset, int64_t value, int64_t count) {
  const bool words = input.dim() == 1 && input.is_contiguous() && input.scalar_type() == at::kUInt32;
  TORCH_CHECK_VALUE(words, "memset32_: the tensor has to be a flat, contiguous one of uint32");
  TORCH_CHECK_VALUE(offset >= 0 && count > 0 && count <= input.numel() - offset, "memset32_: ", count,
                    " words at offset ", offset, " are not inside the ", input.numel(), " words of the tensor");
  TORCH_CHECK_VALUE(value >= 0 && value <= UINT32_MAX, "memset32_: ", value, " does not fit into 32 bits");
  auto* const words_of = static_cast<std::atomic<uint32_t>*>(input.mutable_data_ptr());
  // A peer that sees it also sees what this rank wrote before.
  for (int64_t i = 0; i < count; ++i)
    words_of[offset + i].store(static_cast<uint32_t>(value), std::memory_order_release);
  return input;
}

at::Tensor stream_write_value32_(at::Tensor& input, int64_t offset, int64_t value) {
  return memset32_(input, offset, value, 1);
}

}  // namespace

void register_symmetric_ops() {
  // Not when the library is loaded, where an error would end the process. Never freed: that would take them back.
  auto& library = *new torch::Library(torch::Library::IMPL, "symm_mem", c10::DispatchKey::CPU, __FILE__, __LINE__);
  library.impl("one_shot_all_reduce", one_shot_all_reduce);
  library.impl("one_shot_all_reduce_out", one_shot_all_reduce_out);
  library.impl("one_shot_all_reduce_copy", one_shot_all_reduce_copy);
  library.impl("one_shot_all_reduce_copy_out", one_shot_all_reduce_copy_out);
  library.impl("two_shot_all_reduce_", two_shot_all_reduce_);
  library.impl("two_shot_all_reduce_out", two_shot_all_reduce_out);
  library.impl("reduce_scatter_out", reduce_scatter_out);
  library.impl("_low_contention_all_gather", low_contention_all_gather);
  library.impl("_low_contention_reduce_scatter", low_contention_reduce_scatter);
  library.impl("memset32_", memset32_);
  library.impl("stream_write_value32_", stream_write_value32_);
}

}  // namespace ours

#else

namespace ours {

void register_symmetric_ops() {}

}  // namespace ours

#endif  // TORCH_VERSION_MINOR >= 15
