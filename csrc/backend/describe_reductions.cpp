#include <map>

#include "backend/descriptions.h"
#include "backend/reduce_op.h"
#include "backend/tensors.h"

// all_reduce, reduce and reduce_scatter.

namespace ours {

namespace {

size_t count_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }

/// One reduce_scatter of those that a call consists of.
struct ReduceScatter {
  DType dtype;
  Reduction reduction;
  Tensors sources;  ///< one for each rank, or a single one, which is divided evenly
  Output result;
};

ReduceScatter reduce_scatter_of(const Caller& me, Tensors sources, const at::Tensor& output, const c10d::ReduceOp& op) {
  const DType dtype = dtype_of(output);
  return {dtype, reduction_of(op, dtype, me.size), std::move(sources), Output(output)};
}

Collective reduce_scatter_each(std::vector<ReduceScatter> steps, const Tensors& inputs, const Tensors& outputs) {
  const DType first = steps.front().dtype;
  const bool single = steps.size() == 1;
  return {first,
          inputs,
          {outputs},
          [steps = std::move(steps)](Group& group, const Call& call) {
            for (const ReduceScatter& step : steps) {
              Call one = call;
              one.dtype = step.dtype;
              std::vector<const void*> data;
              std::vector<size_t> counts;
              data.reserve(static_cast<size_t>(group.size()));
              counts.reserve(static_cast<size_t>(group.size()));
              for (const ConstSpan& source : rank_spans(step.sources, group.size())) {
                data.push_back(source.data);
                counts.push_back(source.bytes / size_of(step.dtype));
              }
              void* const result = step.result.span().data;
              if (group.reduce_scatter(one, data, counts, result, step.reduction)) step.result.commit();
            }
          },
          single};
}

}  // namespace

Collective describe_all_reduce(const Caller& me, const Tensors& tensors, const c10d::AllreduceOptions& opts) {
  // Gloo also adds up the tensors of a rank, and NCCL refuses them. A program that passes a list mostly means neither.
  TORCH_CHECK_VALUE(tensors.size() == 1, me.call, ": expected one tensor as input but got ", tensors.size(),
                    "; use all_reduce_coalesced to reduce several");
  const at::Tensor& tensor = tensors.front();
  check_output(me, tensor, "tensor");
  const DType dtype = dtype_of(tensor);
  const Reduction reduction = reduction_of(opts.reduceOp, dtype, me.size);
  return {dtype,
          {tensor},
          {{tensor}},
          [output = Output(tensor, true), reduction](Group& group, const Call& call) {
            void* const data = output.span().data;
            if (group.all_reduce(call, data, data, count_of(output.memory()), reduction)) output.commit();
          },
          true};
}

Collective describe_all_reduce_coalesced(const Caller& me, const Tensors& tensors, const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), me.call, ": the list of tensors is empty; pass at least one");
  // In the order of DType, so that all ranks reduce the types in the same order, whatever the order of their lists.
  std::map<DType, std::vector<Output>> packs;
  std::map<DType, Reduction> reductions;
  for (const at::Tensor& tensor : tensors) {
    check_output(me, tensor, "tensor");
    const DType dtype = dtype_of(tensor);
    reductions[dtype] = reduction_of(opts.reduceOp, dtype, me.size);
    packs[dtype].emplace_back(tensor, true);
  }
  const DType first = packs.begin()->first;
  const bool single = packs.size() == 1;
  return {first,
          tensors,
          {tensors},
          [packs = std::move(packs), reductions = std::move(reductions)](Group& group, const Call& call) {
            for (const auto& [dtype, pack] : packs) {
              Call one = call;
              one.dtype = dtype;
              // A single dtype is a single message, which is the same however a peer has cut it into tensors.
              if (packs.size() == 1) one.op = Op::AllReduce;
              if (group.all_reduce(one, spans_of(pack), reductions.at(dtype))) commit_all(pack);
            }
          },
          single};
}

Collective describe_reduce(const Caller& me, const Tensors& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = only(me, tensors, "input");
  const int root = checked_root(me, opts.rootRank, opts.rootTensor);
  const bool is_root = root == me.rank;
  (is_root ? check_output : check_dense)(me, tensor, "tensor");
  const DType dtype = dtype_of(tensor);
  const Reduction reduction = reduction_of(opts.reduceOp, dtype, me.size);
  return {dtype,
          {tensor},
          {{tensor}},
          [output = is_root ? Output(tensor, true) : Output(contiguous_source(tensor)), reduction, root, is_root](
              Group& group, const Call& call) {
            const at::Tensor& memory = output.memory();
            void* result = is_root ? output.span().data : nullptr;
            const bool ended = group.reduce(call, memory.const_data_ptr(), result, count_of(memory), reduction, root);
            if (ended && is_root) output.commit();
          },
          true};
}

Collective describe_reduce_scatter(const Caller& me, const Tensors& outputs, const TensorLists& inputs,
                                   const c10d::ReduceScatterOptions& opts) {
  const at::Tensor& output = only(me, outputs, "output");
  const Tensors& list = only_list(me, inputs, "input");
  check_inputs(me, list);
  check_output(me, output, "output");
  check_same_dtype(me, output, list.front());
  check_own_part(me, list[me.place()].numel(), output.numel());
  return reduce_scatter_each({reduce_scatter_of(me, contiguous_sources(list), output, opts.reduceOp)}, list, outputs);
}

Collective describe_reduce_scatters(const Caller& me, const Tensors& outputs, const Tensors& inputs,
                                    const c10d::ReduceScatterOptions& opts) {
  check_as_many(me, outputs, inputs);
  std::vector<ReduceScatter> steps;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_pair(me, outputs[i], inputs[i]);
    check_parts(me, inputs[i], outputs[i], "input");
    steps.push_back(reduce_scatter_of(me, {contiguous_source(inputs[i])}, outputs[i], opts.reduceOp));
  }
  return reduce_scatter_each(std::move(steps), inputs, outputs);
}

}  // namespace ours
