#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend/argument_checks.h"
#include "backend/collective.h"
#include "backend/transfer_work.h"

// One function per c10d call, which checks the arguments and returns a description of the operation. None of them
// communicates or touches the process group; all they know of it is the caller's rank and the group's size. They throw
// ValueError if an argument is invalid.

namespace ours {

// ---- reductions (describe_reductions.cpp, describe_sparse.cpp)
Collective describe_all_reduce(const Caller& me, const Tensors& tensors, const c10d::AllreduceOptions& opts);
Collective describe_all_reduce_coalesced(const Caller& me, const Tensors& tensors, const c10d::AllreduceOptions& opts);
Collective describe_all_reduce_sparse(const Caller& me, const Tensors& tensors, const c10d::AllreduceOptions& opts);
Collective describe_reduce(const Caller& me, const Tensors& tensors, const c10d::ReduceOptions& opts);
Collective describe_reduce_scatter(const Caller& me, const Tensors& outputs, const TensorLists& inputs,
                                   const c10d::ReduceScatterOptions& opts);
/// Reduce-scatters each input into the output of the same index, one after another.
Collective describe_reduce_scatters(const Caller& me, const Tensors& outputs, const Tensors& inputs,
                                    const c10d::ReduceScatterOptions& opts);

// ---- moving data (describe_moves.cpp)
Collective describe_broadcast(const Caller& me, const Tensors& tensors, const c10d::BroadcastOptions& opts);
Collective describe_all_gather(const Caller& me, const TensorLists& outputs, const Tensors& inputs,
                               const c10d::AllgatherOptions& opts);
/// All-gathers each input into the output of the same index, one after another.
Collective describe_all_gathers(const Caller& me, const Tensors& outputs, const Tensors& inputs,
                                const c10d::AllgatherOptions& opts);
/// outputs[r][i] gets input i of rank r.
Collective describe_all_gather_coalesced(const Caller& caller, const TensorLists& outputs, const Tensors& inputs,
                                         const c10d::AllgatherOptions& opts);
Collective describe_gather(const Caller& me, const TensorLists& outputs, const Tensors& inputs,
                           const c10d::GatherOptions& opts);
Collective describe_gather_single(const Caller& me, const at::Tensor& output, const at::Tensor& input,
                                  const c10d::GatherOptions& opts);
Collective describe_scatter(const Caller& me, const Tensors& outputs, const TensorLists& inputs,
                            const c10d::ScatterOptions& opts);
Collective describe_all_to_all(const Caller& me, const Tensors& outputs, const Tensors& inputs,
                               const c10d::AllToAllOptions& opts);
/// The splits are the lengths of the ranks' parts along dimension 0; empty: equal parts.
Collective describe_all_to_all_single(const Caller& me, const at::Tensor& output, const at::Tensor& input,
                                      const std::vector<int64_t>& output_splits,
                                      const std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts);
TransferRequest describe_transfer(const Caller& me, Op op, const Tensors& tensors, int peer, int tag);

// ---- synchronising (describe_barriers.cpp)
/// `used`: the device that the group works on, if there is one.
Collective describe_barrier(const Caller& me, std::optional<at::Device> used, const c10d::BarrierOptions& opts);
Collective describe_monitored_barrier(const Caller& me, bool wait_all_ranks, const c10d::BarrierOptions& opts);

}  // namespace ours
