#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/device/device_opening.h"
#include "collectives/device/hosted_group.h"
#include "collectives/pieces.h"
#include "cuda/nccl_api.h"
#include "cuda/nccl_reduction.h"

namespace ours::cuda {

/// Collectives over NCCL, for ranks of which each has a device of its own.
///
/// NCCL does not compare what ranks call, and waits forever. So each call opens in the host group, where a mismatch is
/// found before NCCL is called, and so is a rank that does not come; then the operation runs in a stream of ours, and
/// this rank looks for failures of the host group and of the communicator until it has ended. On any failure the
/// communicator is aborted, which ends kernels that wait for peers. What NCCL takes too long to end is left behind.
///
/// Which of NCCL's operations is used depends only on what all ranks know after the opening.
class NcclGroup final : public HostedGroup {
 public:
  /// Memory for what NCCL cannot reduce, and as much for what it cannot reduce where it lies: longer data goes through
  /// it in steps. It is made with the group: later, a user's stream may wait for an operation that would wait for it.
  static constexpr size_t kScratchBytes = size_t{32} << 20;

  /// Called by all ranks of `host`. Throws TimeoutError after `deadline`.
  static std::shared_ptr<NcclGroup> make(std::shared_ptr<NcclApi> api, std::shared_ptr<Group> host,
                                         std::shared_ptr<Device> device, Deadline deadline,
                                         size_t scratch_bytes = kScratchBytes);
  ~NcclGroup() override;

  std::vector<StreamHandle> streams() const override { return {at_.stream}; }

 protected:
  void do_reduce(const Running& run, const Reducing& job) override;
  void do_reduce_scatter(const Running& run, const Scattering& job) override;
  void do_exchange(const Running& run, const ExchangePlan& plan) override;
  void guarded(const Running& run, const std::function<void()>& body) override;
  bool settle(std::chrono::milliseconds patience) noexcept override;
  void let_go(bool settled) noexcept override;

 private:
  /// A reduction to `root`, or to all (-1); only there is `out` of a meaning.
  struct Whole {
    const void* in;
    void* out;
    size_t count;
    const Reduction& reduction;
    int root;
  };

  NcclGroup(std::shared_ptr<NcclApi> api, std::shared_ptr<Group> host, std::shared_ptr<Device> device,
            size_t scratch_bytes);
  void connect(Deadline deadline);

  // The frame of every operation (nccl_group.cpp).
  /// Calls NCCL, and returns once the stream has got what was called.
  void give(const Running& run, const std::function<void()>& calls);
  void give_group(const Running& run, const std::function<void()>& calls);
  void check_peers(const Running& run);
  void finish(const Running& run);
  void copy(void* to, const void* from, size_t bytes);
  std::byte* scratch() const { return static_cast<std::byte*>(scratch_.get()); }
  /// Where pieces are brought together.
  std::byte* joined() const { return static_cast<std::byte*>(joined_.get()); }
  /// Aborts the communicator, or frees it where it has come to an orderly end. Whether that has ended; if not, it is
  /// left behind with the stream.
  bool drop(bool in_order) noexcept;

  // Reductions (nccl_reduce.cpp).
  void reduce_to(const Running& run, const Whole& job);
  void reduce_by_nccl(const Running& run, const Whole& job, const NcclReduction& how);
  void reduce_gathered(const Running& run, const Whole& job);
  void scatter_by_nccl(const Running& run, const Scattering& job, const NcclReduction& how, bool in_one_piece);
  void scatter_exchanged(const Running& run, const Scattering& job);
  void prepare(void* to, const void* from, size_t count, DType dtype, const Reduction& reduction);
  void fold(void* result, size_t count, size_t stride, const Running& run, const Reduction& reduction);

  // Moving (nccl_move.cpp).
  void exchange_directly(const Running& run, const ExchangePlan& plan);

  const std::shared_ptr<NcclApi> api_;
  const size_t scratch_bytes_;
  NcclComm comm_ = nullptr;  ///< null before it is made, and once it was dropped
  std::unique_ptr<DeviceStream> stream_;
  std::unique_ptr<DeviceEvent> event_;
  NcclPlace at_{};  ///< stays, even where the stream is kept for ever
  std::shared_ptr<void> scratch_, joined_;
};

}  // namespace ours::cuda
