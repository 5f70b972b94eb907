#include <limits>

#include "backend/descriptions.h"
#include "backend/tensors.h"

// The calls that move data unchanged.

namespace ours {

namespace {

/// One all_gather of those that a call consists of.
struct AllGather {
  DType dtype;
  at::Tensor source;
  std::vector<Output> results;  ///< one for each rank, or a single one for all
};

/// `results` get `input` of all ranks.
AllGather all_gather_of(const at::Tensor& input, std::vector<Output> results) {
  return {dtype_of(input), contiguous_source(input), std::move(results)};
}

Collective all_gather_each(std::vector<AllGather> steps, const Tensors& inputs, TensorLists outputs) {
  const DType first = steps.front().dtype;
  const bool single = steps.size() == 1;
  return {first, inputs, std::move(outputs),
          [steps = std::move(steps)](Group& group, const Call& call) {
            for (const AllGather& step : steps) {
              Call one = call;
              one.dtype = step.dtype;
              const std::vector<Span> results = rank_spans(step.results, group.size());
              if (group.all_gather(one, const_span(step.source), results)) commit_all(step.results);
            }
          },
          single};
}

/// `outputs` is empty except on the root, where it has a tensor for each rank or a single one.
Collective gather_to(int root, const at::Tensor& input, const Tensors& outputs) {
  return {dtype_of(input),
          {input},
          {outputs},
          [source = contiguous_source(input), results = outputs_of(outputs), root](Group& group, const Call& call) {
            if (group.gather(call, const_span(source), rank_spans(results, group.size()), root)) commit_all(results);
          },
          true};
}

/// The list of tensors for the ranks, which only the root gives.
Tensors list_of_root(const Caller& me, int root, const TensorLists& lists, const char* role) {
  if (root == me.rank) return only_list(me, lists, role);
  TORCH_CHECK_VALUE(lists.empty() || lists.front().empty(), me.call, ": rank ", me.rank, " gave ", role,
                    "s, but the root is rank ", root, "; only the root has ", role, "s");
  return {};
}

/// The number of elements in each rank's part of `tensor`.
std::vector<int64_t> split_sizes(const Caller& me, const at::Tensor& tensor, const std::vector<int64_t>& splits,
                                 const char* role) {
  const int64_t rows = tensor.dim() == 0 ? tensor.numel() : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % me.size == 0, me.call, ": dimension 0 of the ", role, " has ", rows,
                      " rows, which cannot be divided equally among ", me.size, " ranks; pass ", role, "_split_sizes");
    return std::vector<int64_t>(static_cast<size_t>(me.size), tensor.numel() / me.size);
  }
  TORCH_CHECK_VALUE(splits.size() == static_cast<size_t>(me.size), me.call, ": ", role, "_split_sizes has ",
                    splits.size(), " entries in a group of ", me.size, " ranks; give one for each rank");
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  int64_t sum = 0;
  for (const int64_t split : splits) {
    TORCH_CHECK_VALUE(split >= 0, me.call, ": ", role, "_split_sizes contains ", split, "; sizes must be >= 0");
    sum = split > kMost - sum ? kMost : sum + split;
  }
  TORCH_CHECK_VALUE(sum == rows, me.call, ": ", role, "_split_sizes add up to ", sum, ", but dimension 0 of the ", role,
                    " has ", rows, " rows; make them equal");
  const int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::vector<int64_t> sizes;
  for (const int64_t split : splits) sizes.push_back(split * row);
  return sizes;
}

}  // namespace

Collective describe_broadcast(const Caller& me, const Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const at::Tensor& tensor = only(me, tensors, "input");
  const int root = checked_root(me, opts.rootRank, opts.rootTensor);
  const bool is_root = root == me.rank;
  (is_root ? check_dense : check_output)(me, tensor, "tensor");
  return {dtype_of(tensor),
          {tensor},
          {{tensor}},
          [output = is_root ? Output(contiguous_source(tensor)) : Output(tensor), root, is_root](Group& group,
                                                                                                 const Call& call) {
            const at::Tensor& memory = output.memory();
            // The root's memory is only read: it may be shared with copies of the tensor.
            const Span buffer =
                is_root ? Span{const_cast<void*>(memory.const_data_ptr()), memory.nbytes()} : output.span();
            if (group.broadcast(call, buffer, root) && !is_root) output.commit();
          },
          true};
}

Collective describe_all_gather(const Caller& me, const TensorLists& outputs, const Tensors& inputs,
                               const c10d::AllgatherOptions& /*opts*/) {
  const at::Tensor& input = only(me, inputs, "input");
  const Tensors& list = only_list(me, outputs, "output");
  check_dense(me, input, "input");
  check_outputs(me, list);
  check_same_dtype(me, list.front(), input);
  check_own_part(me, input.numel(), list[me.place()].numel());
  return all_gather_each({all_gather_of(input, outputs_of(list))}, inputs, outputs);
}

Collective describe_all_gathers(const Caller& me, const Tensors& outputs, const Tensors& inputs,
                                const c10d::AllgatherOptions& /*opts*/) {
  check_as_many(me, outputs, inputs);
  std::vector<AllGather> steps;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_pair(me, outputs[i], inputs[i]);
    check_parts(me, outputs[i], inputs[i], "output");
    steps.push_back(all_gather_of(inputs[i], {Output(outputs[i])}));
  }
  return all_gather_each(std::move(steps), inputs, {outputs});
}

Collective describe_all_gather_coalesced(const Caller& caller, const TensorLists& outputs, const Tensors& inputs,
                                         const c10d::AllgatherOptions& /*opts*/) {
  const Caller me{"all_gather_coalesced", caller.rank, caller.size};  // the Op is that of another call, too
  TORCH_CHECK_VALUE(!inputs.empty(), me.call, ": the list of inputs is empty; pass at least one");
  check_list_size(me, outputs.size(), "output");
  TensorLists by_input(inputs.size());
  for (const Tensors& list : outputs) {
    check_as_many(me, list, inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_pair(me, list[i], inputs[i]);
      by_input[i].push_back(list[i]);
    }
  }
  std::vector<AllGather> steps;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_own_part(me, inputs[i].numel(), outputs[me.place()][i].numel());
    steps.push_back(all_gather_of(inputs[i], outputs_of(by_input[i])));
  }
  return all_gather_each(std::move(steps), inputs, outputs);
}

Collective describe_gather(const Caller& me, const TensorLists& outputs, const Tensors& inputs,
                           const c10d::GatherOptions& opts) {
  const at::Tensor& input = only(me, inputs, "input");
  check_dense(me, input, "input");
  const int root = checked_root(me, opts.rootRank);
  const Tensors list = list_of_root(me, root, outputs, "output");
  if (root == me.rank) {
    check_outputs(me, list);
    check_same_dtype(me, list.front(), input);
    check_own_part(me, input.numel(), list[me.place()].numel());
  }
  return gather_to(root, input, list);
}

Collective describe_gather_single(const Caller& me, const at::Tensor& output, const at::Tensor& input,
                                  const c10d::GatherOptions& opts) {
  const int root = checked_root(me, opts.rootRank);
  if (root != me.rank) {
    check_dense(me, input, "input");
    return gather_to(root, input, {});
  }
  check_pair(me, output, input);
  check_parts(me, output, input, "output");
  return gather_to(root, input, {output});
}

Collective describe_scatter(const Caller& me, const Tensors& outputs, const TensorLists& inputs,
                            const c10d::ScatterOptions& opts) {
  const at::Tensor& output = only(me, outputs, "output");
  check_output(me, output, "output");
  const int root = checked_root(me, opts.rootRank);
  const Tensors list = list_of_root(me, root, inputs, "input");
  if (root == me.rank) {
    check_inputs(me, list);
    check_same_dtype(me, output, list.front());
    check_own_part(me, list[me.place()].numel(), output.numel());
  }
  return {dtype_of(output),
          list,
          {outputs},
          [sources = contiguous_sources(list), result = Output(output), root](Group& group, const Call& call) {
            if (group.scatter(call, rank_spans(sources, group.size()), result.span(), root)) result.commit();
          },
          true};
}

Collective describe_all_to_all(const Caller& me, const Tensors& outputs, const Tensors& inputs,
                               const c10d::AllToAllOptions& /*opts*/) {
  check_outputs(me, outputs);
  check_inputs(me, inputs);
  check_same_dtype(me, outputs.front(), inputs.front());
  check_own_part(me, inputs[me.place()].numel(), outputs[me.place()].numel());
  return {dtype_of(inputs.front()),
          inputs,
          {outputs},
          [sources = contiguous_sources(inputs), results = outputs_of(outputs)](Group& group, const Call& call) {
            const std::vector<Span> outs = rank_spans(results, group.size());
            if (group.all_to_all(call, rank_spans(sources, group.size()), outs)) commit_all(results);
          },
          true};
}

Collective describe_all_to_all_single(const Caller& me, const at::Tensor& output, const at::Tensor& input,
                                      const std::vector<int64_t>& output_splits,
                                      const std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& /*opts*/) {
  check_pair(me, output, input);
  std::vector<int64_t> sent = split_sizes(me, input, input_splits, "input");
  std::vector<int64_t> expected = split_sizes(me, output, output_splits, "output");
  check_own_part(me, sent[me.place()], expected[me.place()]);
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
            if (group.all_to_all(call, ins, outs)) result.commit();
          },
          true};
}

TransferRequest describe_transfer(const Caller& me, Op op, const Tensors& tensors, int peer, int tag) {
  const bool sends = op == Op::Send;
  const at::Tensor& tensor = only(me, tensors, sends ? "input" : "output");
  (sends ? check_dense : check_output)(me, tensor, "tensor");
  TORCH_CHECK_VALUE(op == Op::RecvAnySource || (peer >= 0 && peer < me.size && peer != me.rank), me.call,
                    ": the peer is rank ", peer, ", but must be another rank than this one (", me.rank,
                    ") in a group of ", me.size, " ranks");
  TORCH_CHECK_VALUE(tag >= 0, me.call, ": the tag is ", tag, "; tags must be >= 0");
  return {op, tensor, peer, tag, me.rank, 0};
}

}  // namespace ours
