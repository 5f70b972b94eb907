#include "backend/process_group.h"
#include "backend/tensors.h"

// The collectives that move data unchanged.

namespace ours {

ProcessGroupOurs::WorkPtr ProcessGroupOurs::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return launch(Op::Broadcast, opts, [&]() -> Collective {
    const at::Tensor& tensor = only(tensors, "broadcast", "input");
    check_root(opts.rootRank, "broadcast");
    TORCH_CHECK_VALUE(opts.rootTensor == 0, "broadcast: rootTensor is ", opts.rootTensor,
                      "; with one tensor it must be 0");
    const auto root = static_cast<int>(opts.rootRank);
    const bool is_root = root == rank_;
    if (is_root) {
      check_dense(tensor, "broadcast", "the tensor");
    } else {
      check_output(tensor, "broadcast", "the tensor");
    }
    return {dtype_of(tensor),
            {tensor},
            {{tensor}},
            [output = is_root ? Output(contiguous_source(tensor)) : Output(tensor), root, is_root](Group& group,
                                                                                                   const Call& call) {
              const at::Tensor& memory = output.memory();
              // The root's memory is only read: it may be shared with copies of the tensor.
              const Span buffer =
                  is_root ? Span{const_cast<void*>(memory.const_data_ptr()), bytes_of(memory)} : output.span();
              group.broadcast(call, buffer, root);
              if (!is_root) output.commit();
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::allgather(TensorLists& outputs, Tensors& inputs,
                                                      const c10d::AllgatherOptions& opts) {
  return launch(Op::AllGather, opts, [&]() -> Collective {
    const at::Tensor& input = only(inputs, "all_gather", "input");
    TORCH_CHECK_VALUE(outputs.size() == 1, "all_gather: expected one list of outputs but got ", outputs.size());
    const Tensors& list = outputs.front();
    check_dense(input, "all_gather", "the input");
    check_list_size(list.size(), "all_gather", "the output list");
    for (const auto& output : list) check_output(output, "all_gather", "an output");
    check_list(list, "all_gather", "the outputs");
    check_same_dtype(list.front(), input, "all_gather");
    check_own_part(input.numel(), list[static_cast<size_t>(rank_)].numel(), "all_gather");
    return {dtype_of(input),
            {input},
            {list},
            [source = contiguous_source(input), results = outputs_of(list)](Group& group, const Call& call) {
              group.all_gather(call, const_span(source), spans_of(results));
              commit_all(results);
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::all_gather_single(at::Tensor& output, at::Tensor& input,
                                                              const c10d::AllgatherOptions& opts) {
  return launch(Op::AllGatherSingle, opts, [&]() -> Collective {
    constexpr const char* kCall = "all_gather_into_tensor";
    check_dense(input, kCall, "the input");
    check_output(output, kCall, "the output");
    check_same_dtype(output, input, kCall);
    check_parts(output, input, kCall, "the output");
    return {dtype_of(input),
            {input},
            {{output}},
            [source = contiguous_source(input), result = Output(output)](Group& group, const Call& call) {
              group.all_gather(call, const_span(source), parts_of(result.span(), group.size()));
              result.commit();
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                            const c10d::AllgatherOptions& opts) {
  return all_gather_single(output, input, opts);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::gather(TensorLists& outputs, Tensors& inputs,
                                                   const c10d::GatherOptions& opts) {
  return launch(Op::Gather, opts, [&]() -> Collective {
    const at::Tensor& input = only(inputs, "gather", "input");
    check_dense(input, "gather", "the input");
    check_root(opts.rootRank, "gather");
    const auto root = static_cast<int>(opts.rootRank);
    Tensors list;
    if (root == rank_) {
      TORCH_CHECK_VALUE(outputs.size() == 1, "gather: expected one list of outputs on the root but got ",
                        outputs.size());
      list = outputs.front();
      check_list_size(list.size(), "gather", "the output list");
      for (const auto& output : list) check_output(output, "gather", "an output");
      check_list(list, "gather", "the outputs");
      check_same_dtype(list.front(), input, "gather");
      check_own_part(input.numel(), list[static_cast<size_t>(rank_)].numel(), "gather");
    } else {
      TORCH_CHECK_VALUE(outputs.empty() || outputs.front().empty(), "gather: rank ", rank_,
                        " gave outputs, but the root is rank ", root, "; only the root has outputs");
    }
    return {dtype_of(input),
            {input},
            {list},
            [source = contiguous_source(input), results = outputs_of(list), root](Group& group, const Call& call) {
              group.gather(call, const_span(source), spans_of(results), root);
              commit_all(results);
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::gather_single(at::Tensor& output, at::Tensor& input,
                                                          const c10d::GatherOptions& opts) {
  return launch(Op::GatherSingle, opts, [&]() -> Collective {
    check_dense(input, "gather_single", "the input");
    check_root(opts.rootRank, "gather_single");
    const auto root = static_cast<int>(opts.rootRank);
    const bool is_root = root == rank_;
    Tensors list;
    if (is_root) {
      check_output(output, "gather_single", "the output");
      check_same_dtype(output, input, "gather_single");
      check_parts(output, input, "gather_single", "the output");
      list.push_back(output);
    }
    return {dtype_of(input),
            {input},
            {list},
            [source = contiguous_source(input), results = outputs_of(list), root](Group& group, const Call& call) {
              std::vector<Span> spans;
              if (!results.empty()) spans = parts_of(results.front().span(), group.size());
              group.gather(call, const_span(source), spans, root);
              commit_all(results);
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                                               const c10d::GatherOptions& opts) {
  return gather_single(output, input, opts);
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::scatter(Tensors& outputs, TensorLists& inputs,
                                                    const c10d::ScatterOptions& opts) {
  return launch(Op::Scatter, opts, [&]() -> Collective {
    const at::Tensor& output = only(outputs, "scatter", "output");
    check_output(output, "scatter", "the output");
    check_root(opts.rootRank, "scatter");
    const auto root = static_cast<int>(opts.rootRank);
    Tensors list;
    if (root == rank_) {
      TORCH_CHECK_VALUE(inputs.size() == 1, "scatter: expected one list of inputs on the root but got ", inputs.size());
      list = inputs.front();
      check_list_size(list.size(), "scatter", "the input list");
      check_list(list, "scatter", "the inputs");
      check_same_dtype(output, list.front(), "scatter");
      check_own_part(list[static_cast<size_t>(rank_)].numel(), output.numel(), "scatter");
    } else {
      TORCH_CHECK_VALUE(inputs.empty() || inputs.front().empty(), "scatter: rank ", rank_,
                        " gave inputs, but the root is rank ", root, "; only the root has inputs");
    }
    return {dtype_of(output),
            list,
            {{output}},
            [sources = contiguous_sources(list), result = Output(output), root](Group& group, const Call& call) {
              group.scatter(call, const_spans_of(sources), result.span(), root);
              result.commit();
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::alltoall(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllToAllOptions& opts) {
  return launch(Op::AllToAll, opts, [&]() -> Collective {
    check_list_size(outputs.size(), "all_to_all", "the output list");
    check_list_size(inputs.size(), "all_to_all", "the input list");
    for (const auto& output : outputs) check_output(output, "all_to_all", "an output");
    check_list(outputs, "all_to_all", "the outputs");
    check_list(inputs, "all_to_all", "the inputs");
    check_same_dtype(outputs.front(), inputs.front(), "all_to_all");
    const auto me = static_cast<size_t>(rank_);
    check_own_part(inputs[me].numel(), outputs[me].numel(), "all_to_all");
    return {dtype_of(inputs.front()),
            inputs,
            {outputs},
            [sources = contiguous_sources(inputs), results = outputs_of(outputs)](Group& group, const Call& call) {
              group.all_to_all(call, const_spans_of(sources), spans_of(results));
              commit_all(results);
            }};
  });
}

namespace {

/// The number of elements in each rank's part of `tensor`. `splits` are lengths along dimension 0; empty: equal parts.
std::vector<int64_t> split_sizes(const at::Tensor& tensor, const std::vector<int64_t>& splits, int ranks,
                                 const char* role) {
  constexpr const char* kCall = "all_to_all_single";
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % ranks == 0, kCall, ": dimension 0 of the ", role, " has ", rows,
                      " rows, which cannot be divided ", "equally among ", ranks, " ranks; pass ", role,
                      "_split_sizes");
    return std::vector<int64_t>(static_cast<size_t>(ranks), tensor.numel() / ranks);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(ranks), kCall, ": ", role, "_split_sizes has ", splits.size(),
                    " entries in a group of ", ranks, " ranks; give one for each rank");
  int64_t sum = 0;
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, kCall, ": ", role, "_split_sizes contains ", split, "; sizes are not negative");
    sum += split;
  }
  TORCH_CHECK_VALUE(sum == rows, kCall, ": ", role, "_split_sizes add up to ", sum, ", but dimension 0 of the ", role,
                    " has ", rows, " rows; make them equal");
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<int64_t> sizes;
  for (const int64_t split : splits) sizes.push_back(split * row);
  return sizes;
}

}  // namespace

ProcessGroupOurs::WorkPtr ProcessGroupOurs::all_to_all_single(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& opts) {
  return launch(Op::AllToAllSingle, opts, [&]() -> Collective {
    check_dense(input, "all_to_all_single", "the input");
    check_output(output, "all_to_all_single", "the output");
    check_same_dtype(output, input, "all_to_all_single");
    std::vector<int64_t> sent = split_sizes(input, input_splits, size_, "input");
    std::vector<int64_t> expected = split_sizes(output, output_splits, size_, "output");
    check_own_part(sent[static_cast<size_t>(rank_)], expected[static_cast<size_t>(rank_)], "all_to_all_single");
    return {dtype_of(input),
            {input},
            {{output}},
            [source = contiguous_source(input), result = Output(output), sent = std::move(sent),
             expected = std::move(expected)](Group& group, const Call& call) {
              const size_t width = source.element_size();
              std::vector<ConstSpan> ins;
              std::vector<Span> outs;
              const char* from = static_cast<const char*>(source.const_data_ptr());
              char* to = static_cast<char*>(result.span().data);
              for (size_t r = 0; r < sent.size(); ++r) {
                ins.push_back({from, static_cast<size_t>(sent[r]) * width});
                outs.push_back({to, static_cast<size_t>(expected[r]) * width});
                from += ins.back().bytes;
                to += outs.back().bytes;
              }
              group.all_to_all(call, ins, outs);
              result.commit();
            }};
  });
}

ProcessGroupOurs::WorkPtr ProcessGroupOurs::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                          std::vector<int64_t>& output_splits,
                                                          std::vector<int64_t>& input_splits,
                                                          const c10d::AllToAllOptions& opts) {
  return all_to_all_single(output, input, output_splits, input_splits, opts);
}

}  // namespace ours
