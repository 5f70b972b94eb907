#pragma once

#include <ATen/ops/empty.h>

#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unordered_map>
#include <vector>

#include "backend/callback_lanes.h"
#include "backend/coalesced_work.h"
#include "backend/descriptions.h"
#include "backend/device/device_context.h"
#include "backend/errors.h"
#include "backend/heap_allocator.h"
#include "backend/lane.h"
#include "backend/reconfigure_handle.h"

namespace ours {

class SymmetricGroup;

/// The c10d backend "ours": collectives and point-to-point messages of tensors on the CPU and on one device for each
/// rank. device_call.h tells how they fit into the order of a device's work.
///
/// Each collective is described by a function of descriptions.h, and run by a Lane.
///
/// Methods with c10d's names but without `override` are virtual only in later versions of PyTorch.
class ProcessGroupOurs final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Milliseconds = std::chrono::milliseconds;

  struct Options : c10d::Backend::Options {
    explicit Options(Milliseconds timeout = kBackendDefaultTimeout) : c10d::Backend::Options(kName, timeout) {}
    /// The members come from different groups, so an empty global_ranks_in_group does not mean all ranks in order.
    bool merged = false;
    /// Rules of the table of algorithms (Selection) for this group; empty: those of OURS_SELECT.
    std::string selection;
    c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }
  };

  static constexpr const char* kName = "ours";

  /// Blocks until all ranks have come together through `store`. Throws DistBackendError if they have not within
  /// `options->timeout`. With `options->enable_reconfigure`, of torch 2.15, it waits for nobody, and reconfigure() has
  /// to come before anything else.
  ProcessGroupOurs(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options);

  // ---- what it is
  const std::string getBackendName() const override { return kName; }
  /// A copy: torch before 2.15 writes the name and the timeout of a child into it.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_->clone(); }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  bool supportsShrinking() const override { return true; }
  uint64_t getSequenceNumberForGroup() override { return lane_->queue->last_sequence(); }
  void setSequenceNumberForGroup() override {}
  void enableCollectivesTiming() override {}

  // ---- memory that needs no copies in all_reduce
  bool supportsTensorAlloc(c10::DeviceIndex) override { return lane_->group->allocates(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return allocator_; }
  /// A tensor with one dimension of `size` elements of options.dtype(), and undefined contents. On a device it has
  /// torch's memory, which is no slower there.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return options.device().is_cpu() ? allocator_->tensor(size, options) : at::empty({size}, options);
  }

  /// In bytes: "segment", of the shared segments of this rank's node through which its ranks exchange data, and
  /// "tensors", of this rank's tensors that allocateTensor() has made.
  std::unordered_map<std::string, uint64_t> getMemoryStats();

  /// Sets up what collectives of tensors on `device` need; otherwise the first of them does it. All ranks call it.
  void eagerConnectSingleDevice(at::Device device) override;

  // ---- time and failure
  void setTimeout(Milliseconds timeout) override;
  void addEphemeralTimeout(const Milliseconds& timeout) { status_->timeouts.extend(timeout); }
  c10d::ErrorType getError() override;
  /// The message of the failure that ended the group; empty if it has not failed.
  std::string failure() const { return lane_->group->failure(); }
  /// The number of ranks on each node.
  std::vector<int> node_sizes() const { return lane_->group->node_sizes(); }
  /// What its collectives have cost, and which ranks were late. Those that callbacks start are left out.
  const StragglerLedger& ledger() const { return lane_->queue->ledger(); }
  /// Whether a rank had been asked to stop before one of the all-reduces and barriers that this rank's program has
  /// called: the same on all ranks at the same place of their programs. Waits for those that are still under way.
  /// Throws RuntimeError in a forked child and in a signal handler, where it could wait for ever.
  bool heard_stop();
  /// What moves the data of the group's device, and why; empty until it is first needed.
  std::string device_engine() const { return lane_->devices->engine(); }
  /// Fails everything under way within 100 ms, here and on the peers. The group cannot be used any more.
  void abort() override;
  /// Waits for what is queued and leaves the group; the peers may go on. Later operations raise RuntimeError.
  void shutdown() override;

  // ---- hooks
  bool supportsAbortHooks() const { return true; }
  void registerAbortHook(int64_t id, std::function<void()> hook) { status_->abort_hooks.add(id, std::move(hook)); }
  void unregisterAbortHook(int64_t id) { status_->abort_hooks.remove(id); }
#ifdef C10D_BACKEND_HAS_HOOKS
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override { status_->completion_hooks.remove(id); }
#endif
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;

  // ---- reductions
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    if (tensors.size() == 1 && tensors.front().layout() == at::kSparse) return allreduce_sparse(tensors, opts);
    return launch(Op::AllReduce, describe_all_reduce, opts, tensors);
  }
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return launch(Op::AllReduceSparse, describe_all_reduce_sparse, opts, tensors);
  }
  /// The tensors of each dtype are reduced as one message, element by element. Ranks may cut the elements into tensors
  /// differently.
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return launch(Op::AllReduceCoalesced, describe_all_reduce_coalesced, opts, tensors);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return launch(Op::Reduce, describe_reduce, opts, tensors);
  }
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override {
    return launch(Op::ReduceScatter, describe_reduce_scatter, opts, outputs, inputs);
  }
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
    return launch(Op::ReduceScatterSingle, describe_reduce_scatters, opts, Tensors{output}, Tensors{input});
  }
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return reduce_scatter_single(output, input, opts);
  }
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
    return launch(Op::ReduceScatterCoalesced, describe_reduce_scatters, opts, outputs, inputs);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override {
    return reduce_scatter_single_coalesced(outputs, inputs, opts);
  }

  // ---- moving data
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return launch(Op::Broadcast, describe_broadcast, opts, tensors);
  }
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(Op::AllGather, describe_all_gather, opts, outputs, inputs);
  }
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
    return launch(Op::AllGatherSingle, describe_all_gathers, opts, Tensors{output}, Tensors{input});
  }
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return all_gather_single(output, input, opts);
  }
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(Op::AllGatherCoalesced, describe_all_gather_coalesced, opts, outputs, inputs);
  }
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
    return launch(Op::AllGatherCoalesced, describe_all_gathers, opts, outputs, inputs);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override {
    return all_gather_single_coalesced(outputs, inputs, opts);
  }
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return launch(Op::Gather, describe_gather, opts, outputs, inputs);
  }
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
    return launch(Op::GatherSingle, describe_gather_single, opts, output, input);
  }
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
    return gather_single(output, input, opts);
  }
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override {
    return launch(Op::Scatter, describe_scatter, opts, outputs, inputs);
  }
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return launch(Op::AllToAll, describe_all_to_all, opts, outputs, inputs);
  }
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
    return launch(Op::AllToAllSingle, describe_all_to_all_single, opts, output, input, output_splits, input_splits);
  }
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return all_to_all_single(output, input, output_splits, input_splits, opts);
  }

  // ---- synchronising
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // ---- point to point
  WorkPtr send(Tensors& tensors, int dst, int tag) override { return post(Op::Send, tensors, dst, tag); }
  WorkPtr recv(Tensors& tensors, int src, int tag) override { return post(Op::Recv, tensors, src, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return post(Op::RecvAnySource, tensors, kAnySource, tag);
  }

#ifdef C10D_BACKEND_HAS_WINDOW
  // ---- one-sided access (symmetric/window.h)
  bool supportsWindow() const override { return !status_->is_without_ranks() && node_sizes().size() == 1; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif

  // ---- coalescing: the Works that are issued in between become one
  void startCoalescing() override { coalescing_.start(); }
  WorkPtr endCoalescing() override { return coalescing_.end(); }

  // ---- other groups
  c10::intrusive_ptr<c10d::Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const StorePtr& store, const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // ---- other ranks in this group (reconfigure.cpp)
  bool supportsReconfigure() const override { return true; }
  bool isInitialized() override { return !status_->is_without_ranks(); }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return handle_.text(); }
  WorkPtr reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
  /// The uuid of the last reconfigure(); empty if there was none.
  std::string uuid() const { return handle_.uuid ? std::to_string(*handle_.uuid) : ""; }

 private:
  /// Brings the ranks of `meeting` together as the group's new ranks.
  void open(const StorePtr& store, int rank, int size, Milliseconds timeout);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  /// Leaves the ranks that there were; operations under way fail.
  void leave_ranks();
#endif
  std::vector<uint64_t> global_ranks() const;
  GroupNames names() const {
    return {options_->group_name, getGroupDesc(), rank_, size_, options_->global_ranks_in_group};
  }
  Caller caller(Op op) const { return {name_of(op), rank_, size_}; }
  std::vector<std::shared_ptr<Lane>> all_lanes() const;
  void drain_queues();
  std::shared_ptr<SymmetricGroup> windows();
  void abort_all(const char* reason);

  /// Runs or queues the collective that `describe` makes of the arguments. If that throws ValueError, the call still
  /// takes its number, so that the other ranks hear of it instead of waiting for this one. Returns null if a
  /// synchronous call has succeeded, or if the current stream waits for its device tensors. If it returns a Work for a
  /// synchronous call (for hooks, and while coalescing), the caller has to wait for it.
  template <class Describe, class CallOptions, class... Arguments>
  WorkPtr launch(Op op, Describe& describe, const CallOptions& opts, const Arguments&... arguments) {
    Collective collective = or_refuse(op, [&] { return describe(caller(op), arguments..., opts); });
    collective.op = op;
    collective.async_op = opts.asyncOp;
    collective.timeout = opts.timeout;
    return launch(std::move(collective));
  }
  WorkPtr launch(Collective collective);
  template <class Body>
  auto or_refuse(Op op, Body&& body) -> decltype(body()) {
    try {
      return body();
    } catch (const c10::ValueError& e) {
      refuse(op, e.what_without_backtrace());
      throw_misuse(e);
    }
  }
  void refuse(Op op, const std::string& why);
  WorkPtr post(Op op, const Tensors& tensors, int peer, int tag);

  const StorePtr store_;
  const c10::intrusive_ptr<Options> options_;
  std::shared_ptr<GroupStatus> status_;
  std::shared_ptr<Lane> lane_;  // for what the program calls
  std::unique_ptr<CallbackLanes> callback_lanes_;
  std::shared_ptr<HeapAllocator> allocator_;
  std::mutex windows_mutex_;
  std::shared_ptr<SymmetricGroup> windows_;  // guarded by windows_mutex_; null until the first window
  Coalescing coalescing_;
  int shrinks_ = 0;
  ReconfigureHandle handle_;
  std::set<int64_t> uuids_;  // those that reconfigure() has had
  StorePtr meeting_store_;   // over which reconfigure() meets the others; null after an attempt that failed
};

}  // namespace ours
