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
#include "backend/device/device_memory.h"
#include "backend/device/device_side.h"
#include "backend/device/device_transfer.h"
#include "backend/errors.h"
#include "backend/group_end.h"
#include "backend/group_status.h"
#include "backend/heap_allocator.h"
#include "backend/transfer_work.h"
#include "collectives/group.h"
#include "collectives/messages/point_to_point.h"

namespace ours {

/// The c10d backend "ours": collectives and point-to-point messages of tensors on the CPU and, besides, on one device a
/// rank. How those of a device take their place among its work: device_call.h.
///
/// Where to find what: process_group.cpp (construction, life cycle, launching), callback_lanes.cpp (what callbacks
/// start), collectives_reduce.cpp, collectives_move.cpp, collectives_coalesced.cpp, sparse.cpp, point_to_point.cpp,
/// barriers.cpp, membership.cpp (split, merge, shrink).
///
/// Methods without `override` that bear c10d's names are virtual in later versions of PyTorch only.
class ProcessGroupOurs final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using StorePtr = c10::intrusive_ptr<c10d::Store>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<Tensors>;
  using Milliseconds = std::chrono::milliseconds;

  struct Options : c10d::Backend::Options {
    explicit Options(Milliseconds timeout = kBackendDefaultTimeout) : c10d::Backend::Options(kName, timeout) {}
    /// The ranks come from anywhere, so that no global_ranks_in_group does not mean all of them in order.
    bool merged = false;
    /// Rules of the table of algorithms (Selection) for this group; empty: those of OURS_SELECT.
    std::string selection;
    c10::intrusive_ptr<c10d::Backend::Options> clone() const { return c10::make_intrusive<Options>(*this); }
  };

  static constexpr const char* kName = "ours";

  /// Blocks until all ranks have come together through `store`. Throws DistBackendError where they cannot within
  /// `options->timeout`.
  ProcessGroupOurs(StorePtr store, int rank, int size, c10::intrusive_ptr<Options> options);

  /// A lane of `whole`: connections of their own between the same ranks, for what callbacks start. Shares everything
  /// else. Throws as the other one, after `timeout`.
  ProcessGroupOurs(StorePtr store, const ProcessGroupOurs& whole, Milliseconds timeout);

  /// Never blocks on peers. Operations under way fail, here and on the peers.
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
  /// One dimension, `size` elements of options.dtype(), undefined contents. On a device it is memory of the group's
  /// once a collective of that device, or init_process_group(device_id=...), has made what it comes from.
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {
    return options.device().is_cpu() ? allocator_->tensor(size, options) : make_device_tensor(devices_, size, options);
  }

  /// Makes what collectives of tensors on `device` need, which the first of them would do else. All ranks call it.
  void eagerConnectSingleDevice(at::Device device) override;

  // ---- time and failure
  void setTimeout(Milliseconds timeout) override;
  void addEphemeralTimeout(const Milliseconds& timeout) { status_->timeouts.extend(timeout); }
  c10d::ErrorType getError() override;
  /// The message of the failure that ended the group, or empty.
  std::string failure() const { return group_->failure(); }
  /// How many ranks each node has.
  std::vector<int> node_sizes() const { return group_->node_sizes(); }
  /// What moves the data of the group's device, and why that; empty until it was first needed.
  std::string device_engine() const { return devices_->engine(); }
  /// Fails everything under way within 100 ms, here and on the peers. The group cannot be used any more.
  void abort() override;
  /// Waits for what is queued and leaves the group; the peers may go on. Operations after it raise RuntimeError.
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
  /// The tensors of one dtype are reduced as one message: each element with its like on the other ranks. Where the
  /// elements are cut into tensors may differ between ranks.
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

  // ---- coalescing: the Works issued in between become one
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
  /// By rank in the group; empty: unknown.
  std::vector<uint64_t> global_ranks() const;
  void record_flights();
  void connect(Milliseconds timeout);
  void drain_queues();
  void abort_all(const char* reason);
  GroupParts parts() const { return {status_, queue_, group_, point_to_point_, devices_, transfers_}; }

  /// Connections for what callbacks start whose turns come in one order, so that all ranks count alike there.
  struct Lane {
    std::mutex opening;                          // held by the thread that makes the group
    c10::intrusive_ptr<ProcessGroupOurs> group;  // guarded by lanes_mutex_; null before
  };
  /// The lane for what this callback starts, when its turn has come. All ranks make the lane when they need it.
  ProcessGroupOurs& lane_of(const Callback& callback, Op op, Milliseconds timeout);
  c10::intrusive_ptr<ProcessGroupOurs> open_lane(const std::string& name, const std::string& what,
                                                 Milliseconds timeout);
  std::vector<c10::intrusive_ptr<ProcessGroupOurs>> lanes();
  /// Those of the group and of its lanes.
  std::vector<GroupParts> all_parts();

  /// Numbers, traces and runs or queues what `describe` returns. Where that throws ValueError, the call still takes its
  /// number, so that ranks on which all is well hear of it instead of waiting for this one. Where this returns null, a
  /// call that is not asynchronous has ended well, or the current stream waits for its tensors on a device. A Work
  /// that it returns for such a call (for hooks, and while coalescing) is to be waited for.
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
  /// The same, but for what becomes of the Work. `callback`: which starts it, on a lane; otherwise null.
  c10::intrusive_ptr<CollectiveWork> start(Collective collective, Milliseconds timeout, const Callback* callback);
  /// That in which the calling thread is and which has to communicate apart; otherwise null.
  const Callback* current_callback() const;
  /// The number of the collective that comes next.
  uint64_t next_number(const Callback* callback) const;
  /// The part in a device's order of work of a collective that has one; null for CPU tensors.
  std::unique_ptr<DeviceCall> device_call(const Collective& collective, uint64_t number, Milliseconds timeout);
  /// The device that a barrier comes after; none for one of the CPU alone.
  std::optional<at::Device> device_of(const c10d::BarrierOptions& opts) const;
  Collective describe_sparse(const at::Tensor& tensor, const c10d::ReduceOp& op);
  WorkPtr post(Op op, Tensors& tensors, int peer, int tag);
  WorkPtr start_transfer(Op op, Tensors& tensors, int peer, int tag);

  /// Tells profilers and the FlightRecorder of an operation that is about to be issued.
  std::optional<FlightLog::Entry> trace(const CallTrace& call, Milliseconds timeout);

  /// Remembers a Work that this thread issues between startCoalescing() and endCoalescing(); false for others.
  bool coalesce(const WorkPtr& work);

  /// The one tensor of a list that must have one.
  static const at::Tensor& only(const Tensors& tensors, const char* call, const char* role);
  void check_root(int64_t root, const char* call) const;
  void check_parts(const at::Tensor& whole, const at::Tensor& one, const char* call, const char* whole_role) const;
  void check_list_size(size_t size, const char* call, const char* role) const;
  /// Checks the numbers of elements that this rank sends to itself and expects from itself. Peers cannot find that out.
  void check_own_part(int64_t sent, int64_t expected, const char* call) const;

  StorePtr store_;
  c10::intrusive_ptr<Options> options_;
  std::shared_ptr<GroupStatus> status_;
  std::shared_ptr<CommQueue> queue_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<PointToPoint> point_to_point_;
  std::shared_ptr<DeviceSide> devices_;
  std::shared_ptr<DeviceTransfers> transfers_;
  std::shared_ptr<HeapAllocator> allocator_;
  bool inline_calls_;
  std::atomic<uint64_t> transfer_count_{0};
  int shrinks_ = 0;
  std::mutex coalescing_mutex_;
  std::map<std::thread::id, std::vector<WorkPtr>> coalesced_;  // guarded by coalescing_mutex_; by who coalesces
  std::mutex lanes_mutex_;
  std::map<std::string, std::shared_ptr<Lane>> lanes_;  // guarded by lanes_mutex_
};

}  // namespace ours
