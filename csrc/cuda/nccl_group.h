#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "collectives/device/enqueue_group.h"
#include "cuda/nccl_api.h"

namespace ours::cuda {

/// The form in which a reduction is given to NCCL; computed by pure functions of what all ranks called.
struct NcclReduction {
  NcclType type;
  NcclOp op;
  size_t units;                     ///< values of that type in an element
  std::optional<double> factor;     ///< what NCCL multiplies each input by
  std::optional<Reduction> finish;  ///< what Device::reduce() makes of the result
};

/// Empty if NCCL lacks the reduction: bitwise operations, 16-bit integers, and products of complex numbers.
///
/// NCCL adds up in an order of its own, in steps that are rounded to the type, so results of floats differ from those
/// of the other engines in their last bits. Its minimum and maximum of floats may drop NaNs.
std::optional<NcclReduction> nccl_reduction_of(DType dtype, const Reduction& reduction, int ranks);

/// Collectives over NCCL, for ranks that each have a device of their own.
///
/// NCCL does not compare what ranks call, and waits for ever. EnqueueGroup compares, and looks for failures of the
/// peers and of the communicator. On any failure the communicator is aborted, which ends kernels that wait for peers.
/// What NCCL takes too long to end is left behind.
///
/// It does what NCCL does, and no more: reductions that NCCL does not have are refused, and what lies in several places
/// is given to NCCL as several calls at once. So nothing goes through memory of the group's, and all can be captured.
///
/// The operations: nccl_operations.cpp.
class NcclGroup final : public EnqueueGroup {
 public:
  /// Called by all ranks of `host`. Throws TimeoutError after `deadline`.
  static std::shared_ptr<NcclGroup> make(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Group> host,
                                         std::shared_ptr<Device> device, Deadline deadline);
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
  NcclGroup(std::shared_ptr<const Nccl> nccl, std::shared_ptr<Group> host, std::shared_ptr<Device> device)
      : EnqueueGroup(std::move(host), std::move(device)), nccl_(std::move(nccl)) {}
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
  /// Calls calls(), which call NCCL, as a group: they begin all at once. Returns once the stream has got them. Throws
  /// if the communicator has failed or was aborted.
  void give(const Running& run, const std::function<void()>& calls);
  /// Returns once the stream has got what was given. NCCL connects the ranks for the first calls, and the host waits
  /// for that.
  void wait_begun(const Running& run);
  /// Drops the communicator and returns it, so that it can be freed: no call uses it any more, unless one is stuck,
  /// which ends only with an abort, and NCCL allows that. Null if there is none any more.
  NcclComm take_communicator() noexcept;
  /// Whether an orderly end is possible: prepares it, with those of the peers.
  bool can_be_destroyed(NcclComm comm) noexcept;
  /// Calls `how`, destroy or abort, on a thread of its own, which is left behind if that takes longer than `patience`.
  void end_communicator(NcclComm comm, const Nccl::Call<NcclComm>& how, std::chrono::milliseconds patience) noexcept;

  void give_reductions(const Running& run, const NcclReduction& how, const std::function<void(NcclOp)>& calls);
  void finish(void* data, size_t count, DType dtype, const NcclReduction& how);
  void broadcast(const void* from, const Span& to, int root);
  void exchange_directly(const Running& run, const ExchangePlan& plan);

  const std::shared_ptr<const Nccl> nccl_;
  std::atomic<NcclComm> comm_{nullptr};  ///< null before it is made, and once it was dropped, on any thread
  /// Held during calls that use the communicator, and for a moment by a thread that has dropped it.
  std::mutex calling_;
  std::atomic<bool> was_stuck_{false};  ///< a call was under way when the communicator was dropped, and did not return
};

}  // namespace ours::cuda
