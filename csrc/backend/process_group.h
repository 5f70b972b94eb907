#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/collective_work.h"
#include "backend/comm_queue.h"
#include "backend/device/device_context.h"
#include "backend/device/device_memory.h"
#include "backend/device/device_transfer.h"
#include "backend/errors.h"
#include "backend/group_end.h"
#include "backend/group_status.h"
#include "backend/heap_allocator.h"
#include "backend/transfer_work.h"
#include "collectives/group.h"
#include "collectives/messages/point_to_point.h"

namespace ours {

/// The c10d backend "ours": collectives and point-to-point messages of tensors on the CPU and on one device for each
/// rank. device_call.h tells how they fit into the order of a device's work.
///
/// The methods are in process_group.cpp (construction, life cycle, launching), callback_lanes.cpp (what callbacks
/// start), collectives_reduce.cpp, collectives_move.cpp, collectives_coalesced.cpp, sparse.cpp, point_to_point.cpp,
/// barriers.cpp and membership.cpp (split, merge, shrink).
///
/// Methods with c10d's names but without `override` are virtual only in later versions of PyTorch.
class ProcessGroupOurs final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
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
  /// `options->timeout`.
  ProcessGroupOurs(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options);

  /// Makes a lane of `whole`: its own connections between the same ranks, for what callbacks start. It shares
  /// everything else. Throws like the other constructor, after `timeout`.
  ProcessGroupOurs(StorePtr store, const ProcessGroupOurs& whole, Milliseconds timeout);

  /// Does not wait for peers. Operations under way fail, here and on the peers.
  ~ProcessGroupOurs() override;

  // ---- what it is
  const std::string getBackendName() const override { return kName; }
  /// A copy: torch before 2.15 writes the name and the timeout of a child into it.
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_->clone(); }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  bool supportsShrinking() const override { return true; }
  uint64_t getSequenceNumberForGroup() override { return queue_->last_sequence(); }
  void setSequenceNumberForGroup() override {}
  void enableCollectivesTiming() override {}

  // ---- memory that needs no copies in all_reduce
  bool supportsTensorAlloc(c10::DeviceIndex) override { return group_->allocates(); }
  std::shared_ptr<c10::Allocator> getMemAllocator() override { return allocator_; }
  /// A tensor with one dimension of `size` elements of options.dtype(), and undefined contents. On a device it is
  /// memory of the group once a collective of that device, or init_process_group(device_id=...), has set up the group's
  /// allocator.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return options.device().is_cpu() ? allocator_->tensor(size, options) : make_device_tensor(devices_, size, options);
  }

  /// Sets up what collectives of tensors on `device` need; otherwise the first of them does it. All ranks call it.
  void eagerConnectSingleDevice(at::Device device) override;

  // ---- time and failure
  void setTimeout(Milliseconds timeout) override;
  void addEphemeralTimeout(const Milliseconds& timeout) { status_->timeouts.extend(timeout); }
  c10d::ErrorType getError() override;
  /// The message of the failure that ended the group; empty if it has not failed.
  std::string failure() const { return group_->failure(); }
  /// The number of ranks on each node.
  std::vector<int> node_sizes() const { return group_->node_sizes(); }
  /// What moves the data of the group's device, and why; empty until it is first needed.
  std::string device_engine() const { return devices_->engine(); }
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
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  /// The tensors of each dtype are reduced as one message, element by element. Ranks may cut the elements into tensors
  /// differently.
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts);
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts);
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;

  // ---- moving data
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts);
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  WorkPtr all_gather_single_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts);
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts);
  WorkPtr gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts);
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts);
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;

  // ---- synchronising
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  // ---- point to point
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // ---- coalescing: the Works that are issued in between become one
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // ---- other groups
  c10::intrusive_ptr<c10d::Backend> split(const StorePtr& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const StorePtr& store, const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;
  c10::intrusive_ptr<c10d::Backend> shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                                           const c10::intrusive_ptr<c10d::Backend::Options>& opts_override) override;

 private:
  std::vector<uint64_t> global_ranks() const;
  void record_flights();
  void connect(Milliseconds timeout);
  void drain_queues();
  void abort_all(const char* reason);
  GroupParts parts() const { return {status_, queue_, group_, point_to_point_, devices_, transfers_}; }

  /// Connections for what the callbacks of one order start, so that all ranks number it alike.
  struct Lane {
    std::mutex opening;                          // held by the thread that opens the lane
    c10::intrusive_ptr<ProcessGroupOurs> group;  // guarded by lanes_mutex_; null until it is open
  };
  /// Waits for the callback's turn, and returns the lane for what it starts. All ranks open a lane when they first need
  /// it.
  ProcessGroupOurs& lane_of(const Callback& callback, Op op, Milliseconds timeout);
  c10::intrusive_ptr<ProcessGroupOurs> open_lane(const std::string& name, const std::string& what,
                                                 Milliseconds timeout);
  std::vector<c10::intrusive_ptr<ProcessGroupOurs>> lanes();
  std::vector<GroupParts> all_parts();

  /// Numbers, traces, and runs or queues the collective that `describe` returns. If `describe` throws ValueError, the
  /// call still takes its number, so that the other ranks hear of it instead of waiting for this one. Returns null if a
  /// synchronous call has succeeded, or if the current stream waits for its device tensors. If it returns a Work for a
  /// synchronous call (for hooks, and while coalescing), the caller has to wait for it.
  template <class CallOptions, class Describe>
  WorkPtr launch(Op op, const CallOptions& options, Describe&& describe) {
    Collective collective = or_refuse(op, std::forward<Describe>(describe));
    collective.op = op;
    collective.async_op = options.asyncOp;
    collective.timeout = options.timeout;
    return launch(std::move(collective));
  }
  WorkPtr launch(Collective collective);
  template <class Describe>
  auto or_refuse(Op op, Describe&& describe) -> decltype(describe()) {
    try {
      return describe();
    } catch (const c10::ValueError& e) {
      refuse(op, e.what_without_backtrace());
      throw_misuse(e);
    }
  }
  void refuse(Op op, const std::string& why);
  /// Like launch(), without the wait. `callback`: the callback that starts it on a lane, or null.
  c10::intrusive_ptr<CollectiveWork> start(Collective collective, Milliseconds timeout, const Callback* callback);
  /// The callback that the calling thread runs, if what it starts needs a lane; otherwise null.
  const Callback* current_callback() const;
  uint64_t next_number(const Callback* callback) const;
  /// Makes what collectives of tensors on `device` need, unless it is there.
  void connect_device(at::Device device, Milliseconds timeout, const Callback* callback);
  /// The device whose order of work a collective is part of; the CPU: none.
  static at::Device place_of(const Collective& collective);
  /// Its part there, of such a collective.
  std::unique_ptr<DeviceCall> device_call(const Collective& collective, const Call& call);
  /// The device that a barrier comes after; none for one of the CPU alone.
  std::optional<at::Device> device_of(const c10d::BarrierOptions& opts) const;
  Collective describe_sparse(const at::Tensor& tensor, const c10d::ReduceOp& op);
  WorkPtr post(Op op, Tensors& tensors, int peer, int tag);
  WorkPtr start_transfer(Op op, Tensors& tensors, int peer, int tag);

  /// Tells profilers and the FlightRecorder that an operation is about to be issued.
  std::optional<FlightLog::Entry> trace(const CallTrace& call, Milliseconds timeout);

  /// Collects the Work if this thread is between startCoalescing() and endCoalescing(). Returns whether it is.
  bool coalesce(const WorkPtr& work);

  /// The tensor of a list that must have exactly one.
  static const at::Tensor& only(const Tensors& tensors, const char* call, const char* role);
  void check_root(int64_t root, const char* call) const;
  void check_parts(const at::Tensor& whole, const at::Tensor& one, const char* call, const char* whole_role) const;
  void check_list_size(size_t size, const char* call, const char* role) const;
  /// Checks that this rank sends itself as many elements as it expects from itself, which its peers cannot check.
  void check_own_part(int64_t sent, int64_t expected, const char* call) const;

  StorePtr store_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<GroupStatus> status_;
  std::shared_ptr<CommQueue> queue_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<PointToPoint> point_to_point_;
  std::shared_ptr<DeviceContext> devices_;
  std::shared_ptr<DeviceTransfers> transfers_;
  std::shared_ptr<HeapAllocator> allocator_;
  bool inline_calls_;
  std::atomic<uint64_t> transfer_count_{0};
  int shrinks_ = 0;
  std::mutex coalescing_mutex_;
  std::map<std::thread::id, std::vector<WorkPtr>> coalesced_;  // guarded by coalescing_mutex_; by coalescing thread
  std::mutex lanes_mutex_;
  std::map<std::string, std::shared_ptr<Lane>> lanes_;  // guarded by lanes_mutex_
};

}  // namespace ours
