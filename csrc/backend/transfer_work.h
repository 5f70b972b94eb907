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
  int rank;  ///< this one
  uint64_t sequence;
};

/// A send or a receive. The message keeps it alive until it ends, since it uses its memory.
class TransferWork : public OursWork {
 public:
  TransferWork(const TransferRequest& request, std::weak_ptr<PointToPoint> messages,
               std::shared_ptr<GroupStatus> status);

  /// Called once. Never blocks. If it fails, the Work has the error, except that an invalid call throws ValueError.
  void start();

  /// Waits like CollectiveWork::wait(). The transfer's own timeout starts with the first wait without a `timeout`.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;

  /// The future ends with an error when the transfer's timeout has passed since the first call, or when the peer has
  /// left. The transfer and the group go on.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// The sender's rank in the group, once a receive is done.
  int sourceRank() const override { return source_; }

 protected:
  virtual void begin();
  /// Called when the message has left or arrived, or has failed. What it returns may block (point_to_point.h).
  virtual TransferCallbacks message_ended(std::exception_ptr error) noexcept;

  /// Sends or receives this memory, which must stay until message_ended(). Throws if that is impossible.
  void post(Span memory);
  void attend() const override;
  /// Completes the Work. Returns what runs the callbacks on its future, or null if there are none.
  TransferCallbacks end(const std::exception_ptr& error) noexcept;

  bool sends() const { return op_ == Op::Send; }

  const int peer_;
  const int tag_;
  const TransferLimitPtr limit_;
  const at::Tensor input_;  // of a send; contiguous
  const Output output_;     // of a receive

 private:
  const DType dtype_;
  const std::weak_ptr<PointToPoint> messages_;  // weak, since the last owner must not be one of its own threads
  std::mutex transfer_mutex_;
  std::shared_ptr<Transfer> transfer_;  // guarded by transfer_mutex_; null before the message is posted and at the end
  std::atomic<int> source_{-1};
};

}  // namespace ours
