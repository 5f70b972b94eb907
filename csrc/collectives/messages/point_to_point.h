#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>

#include "collectives/group.h"
#include "collectives/messages/transfer_limit.h"

namespace ours {

constexpr int kAnySource = -1;

/// One posted send or receive. Completes exactly once, with or without an error.
class Transfer {
 public:
  virtual ~Transfer() = default;
  virtual bool done() const = 0;
  /// Null unless the transfer failed.
  virtual std::exception_ptr error() const = 0;
  /// The sender's rank, once a receive is done.
  virtual int source() const = 0;
};

/// The callbacks that users of a transfer registered for its end. May block, but not throw; may be empty.
using TransferCallbacks = std::function<void()>;

/// Called once when the transfer completes, on the thread that completed it; must neither block nor throw. The
/// callbacks that it returns are called next on a background thread, while other threads move the other transfers.
using TransferDone = std::function<TransferCallbacks(const Transfer&)>;

/// Messages between two ranks of a group, matched by (source, tag) in the order sent. Independent of the collectives'
/// order. A message whose size or dtype differs from the receive that it matches fails the receive with a MismatchError
/// that names both.
class PointToPoint {
 public:
  virtual ~PointToPoint() = default;

  /// Never blocks. The buffer must live until the transfer is done.
  virtual std::shared_ptr<Transfer> send(ConstSpan buffer, DType dtype, int dst, int tag, TransferLimitPtr limit,
                                         TransferDone done) = 0;
  virtual std::shared_ptr<Transfer> recv(Span buffer, DType dtype, int src, int tag, TransferLimitPtr limit,
                                         TransferDone done) = 0;

  /// Moves messages on the calling thread until `transfer` is done. Starts its limit, which fails the group when it has
  /// passed. Does not throw the transfer's error.
  virtual void wait(Transfer& transfer) = 0;

  /// Lets a background thread move what has been posted from now on: somebody needs it without waiting here. Otherwise
  /// short messages may lie for 10 ms.
  virtual void attend() = 0;

  /// Runs `callbacks` like those of a transfer that has just ended, on another thread, and after close() as well.
  virtual void call(TransferCallbacks callbacks) = 0;

  /// Ends everything posted here with an error, while the peers may go on among themselves, and lets background
  /// threads end without waiting for them. What is posted later fails. May be called more than once.
  virtual void close() noexcept = 0;

  /// After close(): waits at most `limit` until no background thread runs. Returns false if one still does, or if
  /// this is one.
  virtual bool wait_closed(std::chrono::milliseconds limit) = 0;
};

}  // namespace ours
