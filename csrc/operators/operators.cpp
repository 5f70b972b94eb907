#include "operators/operators.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace ours {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

c10d::ReduceOp reduction(const std::string& name) {
  using Op = c10d::ReduceOp;
  static const std::array<std::pair<const char*, Op::RedOpType>, 8> kOps{{{"sum", Op::SUM},
                                                                          {"avg", Op::AVG},
                                                                          {"product", Op::PRODUCT},
                                                                          {"min", Op::MIN},
                                                                          {"max", Op::MAX},
                                                                          {"band", Op::BAND},
                                                                          {"bor", Op::BOR},
                                                                          {"bxor", Op::BXOR}}};
  for (const auto& [known, op] : kOps) {
    if (name == known) return op;
  }
  TORCH_CHECK_VALUE(false, "The reduction is '", name,
                    "', and has to be sum, avg, product, min, max, band, bor or bxor.");
}

Group group_of(const std::string& name, int64_t size) {
  Group group = c10d::resolve_process_group(name);
  TORCH_CHECK_VALUE(size == group->getSize(), "The group has ", group->getSize(), " ranks, not ", size, ".");
  return group;
}

/// What torch.distributed's functions give to a group, which need not know complex numbers.
at::Tensor numbers(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

/// The same for reductions. Only these reduce the parts of a complex number each by itself; others are up to the group.
at::Tensor numbers(const at::Tensor& tensor, const c10d::ReduceOp& op) {
  return op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG ? numbers(tensor) : tensor;
}

void finish(const c10::intrusive_ptr<c10d::Work>& work) {
  if (work) work->wait();  // a group may have finished already
}

#if TORCH_VERSION_MINOR >= 15
constexpr auto kGather = &c10d::ProcessGroup::all_gather_single;
constexpr auto kScatterSums = &c10d::ProcessGroup::reduce_scatter_single;
constexpr auto kExchange = &c10d::ProcessGroup::all_to_all_single;
#else  // the same by their former names
constexpr auto kGather = &c10d::ProcessGroup::_allgather_base;
constexpr auto kScatterSums = &c10d::ProcessGroup::_reduce_scatter_base;
constexpr auto kExchange = &c10d::ProcessGroup::alltoall_base;
#endif

void gather(c10d::ProcessGroup& group, at::Tensor to, at::Tensor from) { finish((group.*kGather)(to, from, {})); }

void scatter_sums(c10d::ProcessGroup& group, at::Tensor to, at::Tensor from,
                  const c10d::ReduceScatterOptions& options) {
  finish((group.*kScatterSums)(to, from, options));
}

void exchange(c10d::ProcessGroup& group, at::Tensor to, at::Tensor from, std::vector<int64_t> to_sizes,
              std::vector<int64_t> from_sizes) {
  finish((group.*kExchange)(to, from, to_sizes, from_sizes, {}));
}

at::Tensor copy_of(const at::Tensor& input) { return input.clone(at::MemoryFormat::Contiguous); }

/// What a collective cuts or puts together: a tensor without dimensions is one row.
at::Tensor rows_of(const at::Tensor& input) { return input.dim() == 0 ? input.reshape(1) : input.contiguous(); }

template <class Sizes>
at::Tensor like(const at::Tensor& input, const Sizes& sizes) {
  return at::empty_symint(sizes, input.options().memory_format(at::MemoryFormat::Contiguous));
}

// ---- the shapes of results. Whether the arguments fit is up to the group, by which all ranks hear of it if not.

std::vector<c10::SymInt> gathered_sizes(const at::Tensor& input, int64_t group_size) {
  std::vector<c10::SymInt> sizes = input.sym_sizes().vec();
  if (sizes.empty()) sizes.emplace_back(1);
  sizes.front() *= group_size;
  return sizes;
}

std::vector<c10::SymInt> scattered_sizes(const at::Tensor& input, int64_t group_size) {
  std::vector<c10::SymInt> sizes = input.sym_sizes().vec();
  if (sizes.empty()) sizes.emplace_back(1);
  sizes.front() = sizes.front() / group_size;
  return sizes;
}

std::vector<c10::SymInt> exchanged_sizes(const at::Tensor& input, at::SymIntArrayRef output_sizes) {
  std::vector<c10::SymInt> sizes = input.sym_sizes().vec();
  if (sizes.empty() || output_sizes.empty()) return sizes;
  sizes.front() = std::accumulate(output_sizes.begin(), output_sizes.end(), c10::SymInt(0));
  return sizes;
}

// ---- with data

at::Tensor all_reduce(const at::Tensor& input, const std::string& reduce_op, const std::string& name) {
  c10d::AllreduceOptions options;
  options.reduceOp = reduction(reduce_op);
  const Group group = c10d::resolve_process_group(name);
  at::Tensor result = copy_of(input);
  std::vector<at::Tensor> tensors{numbers(result, options.reduceOp)};
  finish(group->allreduce(tensors, options));
  return result;
}

at::Tensor all_gather(const at::Tensor& input, int64_t group_size, const std::string& name) {
  const Group group = group_of(name, group_size);
  at::Tensor result = like(input, gathered_sizes(input, group_size));
  gather(*group, numbers(result), numbers(rows_of(input)));
  return result;
}

at::Tensor reduce_scatter(const at::Tensor& input, const std::string& reduce_op, int64_t group_size,
                          const std::string& name) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = reduction(reduce_op);
  const Group group = group_of(name, group_size);
  at::Tensor result = like(input, scattered_sizes(input, group_size));
  scatter_sums(*group, numbers(result, options.reduceOp), numbers(rows_of(input), options.reduceOp), options);
  return result;
}

at::Tensor all_to_all(const at::Tensor& input, at::SymIntArrayRef output_sizes, at::SymIntArrayRef input_sizes,
                      const std::string& name) {
  const Group group = c10d::resolve_process_group(name);
  std::vector<c10::SymInt> sizes = exchanged_sizes(input, output_sizes);
  if (!sizes.empty()) sizes.front() = std::max(sizes.front(), c10::SymInt(0));
  at::Tensor result = like(input, sizes);
  exchange(*group, numbers(result), numbers(input.contiguous()), C10_AS_INTARRAYREF_SLOW(output_sizes).vec(),
           C10_AS_INTARRAYREF_SLOW(input_sizes).vec());
  return result;
}

at::Tensor reduce(const at::Tensor& input, const std::string& reduce_op, int64_t dst, const std::string& name) {
  c10d::ReduceOptions options;
  options.reduceOp = reduction(reduce_op);
  options.rootRank = dst;
  const Group group = c10d::resolve_process_group(name);
  at::Tensor result = copy_of(input);
  std::vector<at::Tensor> tensors{numbers(result, options.reduceOp)};
  finish(group->reduce(tensors, options));
  return group->getRank() == dst ? result : result.zero_();
}

at::Tensor broadcast(const at::Tensor& input, int64_t src, const std::string& name) {
  c10d::BroadcastOptions options;
  options.rootRank = src;
  const Group group = c10d::resolve_process_group(name);
  at::Tensor result = copy_of(input);
  std::vector<at::Tensor> tensors{numbers(result)};
  finish(group->broadcast(tensors, options));
  return result;
}

// ---- without data

at::Tensor all_reduce_shape(const at::Tensor& input, const std::string& /*reduce_op*/, const std::string& /*name*/) {
  return like(input, input.sym_sizes());
}

at::Tensor all_gather_shape(const at::Tensor& input, int64_t group_size, const std::string& /*name*/) {
  return like(input, gathered_sizes(input, group_size));
}

at::Tensor reduce_scatter_shape(const at::Tensor& input, const std::string& /*reduce_op*/, int64_t group_size,
                                const std::string& /*name*/) {
  const c10::SymInt rows = input.dim() == 0 ? c10::SymInt(1) : input.sym_size(0);
  const bool fits = group_size > 0 && rows % group_size == 0;
  TORCH_CHECK_VALUE(fits, "A tensor of ", input.sym_sizes(), " cannot be cut into ", group_size,
                    " equal parts along its first dimension.");
  return like(input, scattered_sizes(input, group_size));
}

at::Tensor all_to_all_shape(const at::Tensor& input, at::SymIntArrayRef output_sizes,
                            at::SymIntArrayRef /*input_sizes*/, const std::string& /*name*/) {
  return like(input, exchanged_sizes(input, output_sizes));
}

at::Tensor reduce_shape(const at::Tensor& input, const std::string& /*reduce_op*/, int64_t /*dst*/,
                        const std::string& /*name*/) {
  return like(input, input.sym_sizes());
}

at::Tensor broadcast_shape(const at::Tensor& input, int64_t /*src*/, const std::string& /*name*/) {
  return like(input, input.sym_sizes());
}

template <class Signature>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

at::Tensor operator_all_reduce(const at::Tensor& input, const std::string& reduce_op, const std::string& group) {
  static const auto kOp = operator_of<decltype(all_reduce)>("ours::all_reduce");
  return kOp.call(input, reduce_op, group);
}

at::Tensor operator_all_gather(const at::Tensor& input, int64_t group_size, const std::string& group) {
  static const auto kOp = operator_of<decltype(all_gather)>("ours::all_gather_into_tensor");
  return kOp.call(input, group_size, group);
}

at::Tensor operator_reduce_scatter(const at::Tensor& input, const std::string& reduce_op, int64_t group_size,
                                   const std::string& group) {
  static const auto kOp = operator_of<decltype(reduce_scatter)>("ours::reduce_scatter_tensor");
  return kOp.call(input, reduce_op, group_size, group);
}

at::Tensor operator_all_to_all(const at::Tensor& input, at::SymIntArrayRef output_sizes, at::SymIntArrayRef input_sizes,
                               const std::string& group) {
  static const auto kOp = operator_of<decltype(all_to_all)>("ours::all_to_all_single");
  return kOp.call(input, output_sizes, input_sizes, group);
}

at::Tensor operator_reduce(const at::Tensor& input, const std::string& reduce_op, int64_t dst,
                           const std::string& group) {
  static const auto kOp = operator_of<decltype(reduce)>("ours::reduce");
  return kOp.call(input, reduce_op, dst, group);
}

at::Tensor operator_broadcast(const at::Tensor& input, int64_t src, const std::string& group) {
  static const auto kOp = operator_of<decltype(broadcast)>("ours::broadcast");
  return kOp.call(input, src, group);
}

void register_operators() {
  // Not when the library is loaded, where an error would end the process. Never freed: that would take them back.
  auto& schemas = *new torch::Library(torch::Library::DEF, "ours", std::nullopt, __FILE__, __LINE__);
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  schemas.def("all_reduce(Tensor input, str reduce_op, str group_name) -> Tensor", tags);
  schemas.def("all_gather_into_tensor(Tensor input, int group_size, str group_name) -> Tensor", tags);
  schemas.def("reduce_scatter_tensor(Tensor input, str reduce_op, int group_size, str group_name) -> Tensor", tags);
  schemas.def(
      "all_to_all_single(Tensor input, SymInt[] output_split_sizes, SymInt[] input_split_sizes, str group_name) -> "
      "Tensor",
      tags);
  schemas.def("reduce(Tensor input, str reduce_op, int dst, str group_name) -> Tensor", tags);
  schemas.def("broadcast(Tensor input, int src, str group_name) -> Tensor", tags);
  schemas.def("copy_to_ranks(Tensor(a) input, str group_name) -> Tensor(a)", tags);
  schemas.def("reduce_from_ranks(Tensor input, str group_name) -> Tensor", tags);

  const auto implement = [](c10::DispatchKey key) -> torch::Library& {
    return *new torch::Library(torch::Library::IMPL, "ours", key, __FILE__, __LINE__);
  };
  torch::Library& data = implement(c10::DispatchKey::CompositeExplicitAutograd);
  data.impl("all_reduce", all_reduce);
  data.impl("all_gather_into_tensor", all_gather);
  data.impl("reduce_scatter_tensor", reduce_scatter);
  data.impl("all_to_all_single", all_to_all);
  data.impl("reduce", reduce);
  data.impl("broadcast", broadcast);
  torch::Library& shapes = implement(c10::DispatchKey::Meta);
  shapes.impl("all_reduce", all_reduce_shape);
  shapes.impl("all_gather_into_tensor", all_gather_shape);
  shapes.impl("reduce_scatter_tensor", reduce_scatter_shape);
  shapes.impl("all_to_all_single", all_to_all_shape);
  shapes.impl("reduce", reduce_shape);
  shapes.impl("broadcast", broadcast_shape);
  register_operator_gradients();
}

}  // namespace ours
