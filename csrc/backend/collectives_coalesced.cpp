#include <map>

#include "backend/process_group.h"
#include "backend/reduce_op.h"
#include "backend/tensors.h"

// Collectives over lists of tensors, as one Work.

namespace ours {

ProcessGroupOurs::WorkPtr ProcessGroupOurs::allreduce_coalesced(Tensors& tensors,
                                                                const c10d::AllreduceCoalescedOptions& opts) {
  return launch(Op::AllReduceCoalesced, opts, [&]() -> Collective {
    constexpr const char* kCall = "all_reduce_coalesced";
    TORCH_CHECK_VALUE(!tensors.empty(), kCall, ": the list of tensors is empty; pass at least one");
    for (const auto& tensor : tensors) check_output(tensor, kCall, "a tensor");
    // In the order of DType, so that all ranks reduce the types in the same order, whatever the order of their lists.
    std::map<DType, std::vector<Output>> packs;
    std::map<DType, Reduction> reductions;
    for (const auto& tensor : tensors) {
      const DType dtype = dtype_of(tensor);
      reductions[dtype] = reduction_of(opts.reduceOp, dtype, size_);
      packs[dtype].emplace_back(tensor, true);
    }
    return {packs.begin()->first,
            tensors,
            {tensors},
            [packs = std::move(packs), reductions = std::move(reductions)](Group& group, const Call& call) {
              for (const auto& [dtype, pack] : packs) {
                Call one = call;
                one.dtype = dtype;
                // A single dtype is a single message, which is the same however a peer has cut it into tensors.
                if (packs.size() == 1) one.op = Op::AllReduce;
                group.all_reduce(one, spans_of(pack), reductions.at(dtype));
                commit_all(pack);
              }
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                                            const c10d::ReduceScatterOptions& opts) {
  return launch(Op::ReduceScatterCoalesced, opts, [&]() -> Collective {
    constexpr const char* kCall = "reduce_scatter_tensor_coalesced";
    TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), kCall, ": got ", outputs.size(),
                      " outputs and ", inputs.size(), " inputs; give as many of both, and at least one");
    std::vector<Reduction> reductions;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_dense(inputs[i], kCall, "an input");
      check_output(outputs[i], kCall, "an output");
      check_same_dtype(outputs[i], inputs[i], kCall);
      check_parts(inputs[i], outputs[i], kCall, "an input");
      reductions.push_back(reduction_of(opts.reduceOp, dtype_of(inputs[i]), size_));
    }
    return {dtype_of(inputs.front()),
            inputs,
            {outputs},
            [sources = contiguous_sources(inputs), results = outputs_of(outputs), reductions = std::move(reductions)](
                Group& group, const Call& call) {
              for (size_t i = 0; i < sources.size(); ++i) {
                Call one = call;
                one.dtype = dtype_of(sources[i]);
                std::vector<const void*> data;
                for (const ConstSpan& part : parts_of(const_span(sources[i]), group.size())) {
                  data.push_back(part.data);
                }
                const std::vector<size_t> counts(data.size(), static_cast<size_t>(results[i].memory().numel()));
                group.reduce_scatter(one, data, counts, results[i].span().data, reductions[i]);
                results[i].commit();
              }
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                            const c10d::ReduceScatterOptions& opts) {
  return reduce_scatter_single_coalesced(outputs, inputs, opts);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                                        const c10d::AllgatherOptions& opts) {
  return launch(Op::AllGatherCoalesced, opts, [&]() -> Collective {
    constexpr const char* kCall = "all_gather_into_tensor_coalesced";
    TORCH_CHECK_VALUE(!inputs.empty() && inputs.size() == outputs.size(), kCall, ": got ", outputs.size(),
                      " outputs and ", inputs.size(), " inputs; give as many of both, and at least one");
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_dense(inputs[i], kCall, "an input");
      check_output(outputs[i], kCall, "an output");
      check_same_dtype(outputs[i], inputs[i], kCall);
      check_parts(outputs[i], inputs[i], kCall, "an output");
      dtype_of(inputs[i]);
    }
    return {dtype_of(inputs.front()),
            inputs,
            {outputs},
            [sources = contiguous_sources(inputs), results = outputs_of(outputs)](Group& group, const Call& call) {
              for (size_t i = 0; i < sources.size(); ++i) {
                Call one = call;
                one.dtype = dtype_of(sources[i]);
                group.all_gather(one, const_span(sources[i]), parts_of(results[i].span(), group.size()));
                results[i].commit();
              }
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                            const c10d::AllgatherOptions& opts) {
  return all_gather_single_coalesced(outputs, inputs, opts);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                                                const c10d::AllgatherOptions& opts) {
  return launch(Op::AllGatherCoalesced, opts, [&]() -> Collective {
    constexpr const char* kCall = "all_gather_coalesced";
    TORCH_CHECK_VALUE(!inputs.empty(), kCall, ": the list of inputs is empty; pass at least one");
    check_list_size(outputs.size(), kCall, "the list of output lists");
    for (const auto& list : outputs) {
      TORCH_CHECK_VALUE(list.size() == inputs.size(), kCall, ": an output list has ", list.size(),
                        " tensors, but there are ", inputs.size(), " inputs; give as many");
      for (size_t i = 0; i < inputs.size(); ++i) {
        check_dense(inputs[i], kCall, "an input");
        check_output(list[i], kCall, "an output");
        check_same_dtype(list[i], inputs[i], kCall);
        dtype_of(inputs[i]);
      }
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_own_part(inputs[i].numel(), outputs[static_cast<size_t>(rank_)][i].numel(), kCall);
    }
    // Sorted by input, in the order in which the operation runs: results[i][r] receives input i of rank r.
    std::vector<std::vector<Output>> results(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (const auto& list : outputs) results[i].emplace_back(list[i]);
    }
    return {dtype_of(inputs.front()), inputs, outputs,
            [sources = contiguous_sources(inputs), results = std::move(results)](Group& group, const Call& call) {
              for (size_t i = 0; i < sources.size(); ++i) {
                Call one = call;
                one.dtype = dtype_of(sources[i]);
                group.all_gather(one, const_span(sources[i]), spans_of(results[i]));
                commit_all(results[i]);
              }
            }};
  });
}

}  // namespace ours
