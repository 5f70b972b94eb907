#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "collectives/device/enqueue_group.h"
#include "common/partition.h"
#include "cuda/nccl_api.h"
#include "cuda/nccl_reduction.h"

namespace ours::cuda {

/// Collectives over NCCL, for ranks that each have a device of their own.
///
/// NCCL does not compare what ranks call, and waits for ever. EnqueueGroup compares, and looks for failures of the
/// peers and of the communicator. On any failure the communicator is aborted, which ends kernels that wait for peers.
/// What NCCL takes too long to end is left behind.
///
/// A group of more than kMostDeviceRanks ranks refuses the reductions that NCCL does not have.
///
/// Reductions: nccl_reduce.cpp. Collectives that move data unchanged: nccl_move.cpp.
class NcclGroup final : public EnqueueGroup {
 public:
  /// The size of the scratch memory for data that NCCL cannot reduce, and of another one for data that it cannot
  /// reduce where it lies. Longer data goes through them in steps.
  static constexpr size_t kScratchBytes = size_t{32} << 20;

  /// Called by all ranks of `host`. Throws TimeoutError after `deadline`.
  static std::shared_ptr<NcclGroup> make(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Group> host,
                                         std::shared_ptr<Device> device, Deadline deadline,
                                         size_t scratch_bytes = kScratchBytes);
  ~NcclGroup() override { end(); }

  /// Ends graphs that are being replayed, too, of which nothing else knows. After leave() it does nothing to graphs:
  /// NCCL frees the communicator only when they are gone, and until then they may be replayed.
  void abort(const std::string& reason) override;

 protected:
  void check_possible(DType dtype, const Reduction& reduction) const override;
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void check_engine() override;
  void stop_device_work() noexcept override;
  void let_go() noexcept override;

 private:
  /// A reduction to `root`, or to all (-1). `out` has a meaning only on ranks that get the result.
  struct Whole {
    const void* in;
    void* out;
    size_t count;
    const Reduction& reduction;
    int root;
  };

  NcclGroup(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Group> host, std::shared_ptr<Device> device,
            size_t scratch_bytes);
  void connect(Deadline deadline);

  /// Calls a function of NCCL. Throws DeviceError.
  template <class... Parameters, class... Arguments>
  void invoke(const NcclFunction<ncclResult_t(Parameters...)>& function, Arguments... arguments) const {
    check(function.name, function.run(arguments...));
  }
  void check(const char* what, ncclResult_t result) const;
  /// The communicator. Throws AbortedError if it was dropped. Only for use while calling_ is locked.
  NcclComm comm() const;
  /// Whether the last call of NCCL has been given to the stream. Throws if the communicator has failed.
  bool is_ready(NcclComm comm) const;
  /// Calls calls(), which call NCCL, and returns once the stream has got them. NCCL connects the ranks for the first
  /// calls, and the host waits for that. Throws if the communicator has failed or was aborted.
  void give(const Running& run, const std::function<void()>& calls);
  /// Does the same for calls that begin all at once.
  void give_group(const Running& run, const std::function<void()>& calls);
  void copy(void* to, const void* from, size_t bytes);
  /// Drops the communicator and returns it, so that it can be freed: no call uses it any more, unless one is stuck,
  /// which ends only with an abort, and NCCL allows that. Null if there is none any more.
  NcclComm take_communicator() noexcept;
  /// Whether an orderly end is possible: prepares it, with those of the peers.
  bool can_be_destroyed(NcclComm comm) noexcept;
  /// Calls `how`, destroy or abort, on a thread of its own, which is left behind if that takes longer than `patience`.
  void end_communicator(NcclComm comm, const Nccl::Call<NcclComm>& how, std::chrono::milliseconds patience) noexcept;

  /// Throws InvalidArgument if the stream is being captured: a replay of the graph would use the memory below beside
  /// other operations.
  void refuse_capture(const Running& run);
  std::byte* scratch() const { return static_cast<std::byte*>(scratch_.get()); }
  /// The memory in which pieces are brought together.
  std::byte* joined() const { return scratch() + scratch_bytes_; }

  void reduce_to(const Running& run, const Whole& job);
  void reduce_joined(const Running& run, const Reducing& job, Slice part);
  void reduce_by_nccl(const Running& run, const Whole& job, const NcclReduction& how);
  void reduce_gathered(const Running& run, const Whole& job);
  void scatter_by_nccl(const Running& run, const Scattering& job, const NcclReduction& how);
  void prepare(void* to, const void* from, size_t count, DType dtype, const Reduction& reduction);

  void all_gather_even(const Running& run, const ExchangePlan& plan);
  void exchange_directly(const Running& run, const ExchangePlan& plan);

  const std::shared_ptr<const Nccl> nccl_;
  const size_t scratch_bytes_;
  std::atomic<NcclComm> comm_{nullptr};  ///< null before it is made, and once it was dropped, on any thread
  /// Held during calls that use the communicator, and for a moment by a thread that has dropped it.
  std::mutex calling_;
  std::atomic<bool> was_stuck_{false};  ///< a call was under way when the communicator was dropped, and did not return
  std::shared_ptr<void> scratch_;       ///< of scratch_bytes_, twice
};

}  // namespace ours::cuda
