#pragma once

#include <memory>

#include "backend/tensors.h"
#include "backend/work.h"
#include "collectives/messages/point_to_point.h"

namespace ours {

/// What to transfer, and with which peer.
struct TransferRequest {
  Op op;
  at::Tensor tensor;
  int peer;  ///< kAnySource for RecvAnySource
  int tag;
  uint64_t sequence;
  std::optional<FlightLog::Entry> flight;
};

/// A send or a receive. It keeps itself alive until the transfer ends, since the transfer uses its memory.
class TransferWork final : public OursWork {
 public:
  /// Posts the transfer. If that fails, the Work has the error, except that an invalid call throws ValueError.
  static c10::intrusive_ptr<TransferWork> post(const TransferRequest& request, int rank,
                                               const std::shared_ptr<PointToPoint>& p2p,
                                               const std::shared_ptr<GroupStatus>& status);

  TransferWork(const TransferRequest& request, int rank, std::weak_ptr<PointToPoint> p2p,
               std::shared_ptr<GroupStatus> status);

  /// Waits like CollectiveWork::wait(). The transfer's own timeout starts with the first wait without a `timeout`.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  /// The future ends with an error when the transfer's timeout has passed since the first call, or when the peer has
  /// left. The transfer and the group go on.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// The sender's rank in the group, once a receive is done.
  int sourceRank() const override { return source_; }

 private:
  TransferCallbacks end(const Transfer& transfer) noexcept;

  const TransferLimitPtr limit_;
  const std::weak_ptr<PointToPoint> p2p_;  // weak, since the last owner must not be one of its own threads
  at::Tensor input_;                       // of a send
  Output output_;                          // of a receive
  std::mutex transfer_mutex_;
  std::shared_ptr<Transfer> transfer_;  // guarded by transfer_mutex_; null before and after the transfer
  std::atomic<int> source_{-1};
};

}  // namespace ours
