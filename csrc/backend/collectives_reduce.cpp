#include "backend/process_group.h"
#include "backend/reduce_op.h"
#include "backend/tensors.h"

// The reductions: all_reduce, reduce, reduce_scatter.

namespace ours {

namespace {

size_t count_of(const at::Tensor& tensor) { return static_cast<size_t>(tensor.numel()); }

}  // namespace

ProcessGroupOurs::WorkPtr ProcessGroupOurs::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (tensors.size() == 1 && tensors.front().layout() == at::kSparse) return allreduce_sparse(tensors, opts);
  return launch(Op::AllReduce, opts, [&]() -> Collective {
    // Gloo also adds up the tensors of a rank, and NCCL refuses them. A program that passes a list mostly means
    // neither.
    TORCH_CHECK_VALUE(tensors.size() == 1, "all_reduce: expected one tensor as input but got ", tensors.size(),
                      "; a process drives one device, so pass one, or several to all_reduce_coalesced, which reduces "
                      "each by itself");
    const at::Tensor& tensor = tensors.front();
    check_output(tensor, "all_reduce", "the tensor");
    const DType dtype = dtype_of(tensor);
    const Reduction reduction = reduction_of(opts.reduceOp, dtype, size_);
    return {dtype, {tensor}, {{tensor}}, [output = Output(tensor, true), reduction](Group& group, const Call& call) {
              void* data = output.span().data;
              group.all_reduce(call, data, data, count_of(output.memory()), reduction);
              output.commit();
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return launch(Op::Reduce, opts, [&]() -> Collective {
    const at::Tensor& tensor = only(tensors, "reduce", "input");
    check_root(opts.rootRank, "reduce");
    TORCH_CHECK_VALUE(opts.rootTensor == 0, "reduce: rootTensor is ", opts.rootTensor,
                      "; with one tensor it must be 0");
    const auto root = static_cast<int>(opts.rootRank);
    const bool is_root = root == rank_;
    if (is_root) {
      check_output(tensor, "reduce", "the tensor");
    } else {
      check_dense(tensor, "reduce", "the tensor");
    }
    const DType dtype = dtype_of(tensor);
    const Reduction reduction = reduction_of(opts.reduceOp, dtype, size_);
    return {dtype,
            {tensor},
            {{tensor}},
            [output = is_root ? Output(tensor, true) : Output(contiguous_source(tensor)), reduction, root, is_root](
                Group& group, const Call& call) {
              const at::Tensor& memory = output.memory();
              void* result = is_root ? output.span().data : nullptr;
              group.reduce(call, memory.const_data_ptr(), result, count_of(memory), reduction, root);
              if (is_root) output.commit();
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                                           const c10d::ReduceScatterOptions& opts) {
  return launch(Op::ReduceScatter, opts, [&]() -> Collective {
    const at::Tensor& output = only(outputs, "reduce_scatter", "output");
    TORCH_CHECK_VALUE(inputs.size() == 1, "reduce_scatter: expected one list of inputs but got ", inputs.size());
    const Tensors& list = inputs.front();
    check_list_size(list.size(), "reduce_scatter", "the input list");
    check_list(list, "reduce_scatter", "the inputs");
    check_output(output, "reduce_scatter", "the output");
    check_same_dtype(output, list.front(), "reduce_scatter");
    check_own_part(list[static_cast<size_t>(rank_)].numel(), output.numel(), "reduce_scatter");
    const DType dtype = dtype_of(output);
    const Reduction reduction = reduction_of(opts.reduceOp, dtype, size_);
    return {dtype,
            list,
            {{output}},
            [sources = contiguous_sources(list), result = Output(output), reduction](Group& group, const Call& call) {
              std::vector<const void*> data;
              std::vector<size_t> counts;
              for (const auto& source : sources) {
                data.push_back(source.const_data_ptr());
                counts.push_back(count_of(source));
              }
              group.reduce_scatter(call, data, counts, result.span().data, reduction);
              result.commit();
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                                                  const c10d::ReduceScatterOptions& opts) {
  return launch(Op::ReduceScatterSingle, opts, [&]() -> Collective {
    constexpr const char* kCall = "reduce_scatter_tensor";
    check_dense(input, kCall, "the input");
    check_output(output, kCall, "the output");
    check_same_dtype(output, input, kCall);
    check_parts(input, output, kCall, "the input");
    const DType dtype = dtype_of(output);
    const Reduction reduction = reduction_of(opts.reduceOp, dtype, size_);
    return {dtype,
            {input},
            {{output}},
            [source = contiguous_source(input), result = Output(output), reduction](Group& group, const Call& call) {
              std::vector<const void*> data;
              for (const ConstSpan& part : parts_of(const_span(source), group.size())) data.push_back(part.data);
              const std::vector<size_t> counts(data.size(), count_of(result.memory()));
              group.reduce_scatter(call, data, counts, result.span().data, reduction);
              result.commit();
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                 const c10d::ReduceScatterOptions& opts) {
  return reduce_scatter_single(output, input, opts);
}

}  // namespace ours
