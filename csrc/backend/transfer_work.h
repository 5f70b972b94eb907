#pragma once

#include <memory>

#include "backend/tensors.h"
#include "backend/work.h"
#include "collectives/messages/point_to_point.h"

namespace ours {

/// What to transfer and with whom.
struct TransferRequest {
  Op op;
  at::Tensor tensor;
  int peer;  ///< kAnySource for RecvAnySource
  int tag;
  uint64_t sequence;
  std::optional<FlightLog::Entry> flight;
};

/// One send or receive. It keeps itself alive until the transfer ends, since the transfer uses its memory.
class TransferWork final : public OursWork {
 public:
  /// Posts the transfer. Errors at this point belong to the Work, too, except misuse (ValueError), which is thrown.
  static c10::intrusive_ptr<TransferWork> post(const TransferRequest& request, int rank,
                                               const std::shared_ptr<PointToPoint>& p2p,
                                               const std::shared_ptr<GroupStatus>& status);

  TransferWork(const TransferRequest& request, int rank, std::weak_ptr<PointToPoint> p2p,
               std::shared_ptr<GroupStatus> status);

  /// Waits as CollectiveWork::wait does. The transfer's own time runs from the first wait without a `timeout`.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  /// The same as OursWork::getFuture, but it ends with an error when the transfer's time has passed since the first
  /// call of this, or its peer has left. The transfer goes on then, and the group.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// The sender's rank in the group, once a receive is done.
  int sourceRank() const override { return source_; }

 private:
  TransferCallbacks end(const Transfer& transfer) noexcept;

  const TransferLimitPtr limit_;
  const std::weak_ptr<PointToPoint> p2p_;  // weak: what ends last must not be a thread of its own
  at::Tensor input_;                       // of a send
  Output output_;                          // of a receive
  std::mutex transfer_mutex_;
  std::shared_ptr<Transfer> transfer_;  // guarded by transfer_mutex_; null before and after the transfer
  std::atomic<int> source_{-1};
};

}  // namespace ours
