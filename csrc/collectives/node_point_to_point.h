#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "collectives/message_queue.h"
#include "collectives/point_to_point.h"
#include "transport/node_session.h"

namespace ours {

/// Messages between ranks that share memory. Whoever posts a transfer tries at once; what cannot complete is moved on
/// by the thread that waits for it, or else by a background thread that is started on first need.
class NodePointToPoint final : public PointToPoint {
 public:
  explicit NodePointToPoint(std::shared_ptr<NodeSession> session);
  ~NodePointToPoint() override;

  std::shared_ptr<Transfer> send(ConstSpan buffer, DType dtype, int dst, int tag, Deadline deadline,
                                 TransferDone done) override;
  std::shared_ptr<Transfer> recv(Span buffer, DType dtype, int src, int tag, Deadline deadline,
                                 TransferDone done) override;
  void wait(Transfer& transfer) override;

 private:
  std::shared_ptr<Transfer> post(const std::shared_ptr<Message>& message);

  /// Moves all messages as far as they go and completes those that ended. Returns whether anything moved. Expects
  /// `lock` to be held, and releases it for the callbacks.
  bool progress(std::unique_lock<std::mutex>& lock);

  /// Moves messages, and rests while nothing moves, until stop() holds. stop() is called without the lock.
  template <class Stop>
  void drive(Stop&& stop);

  /// Fails the group if a message's peer is gone or its time is up. Returns whether the group has failed. Needs the
  /// lock.
  bool look_around();

  /// The rank without which `message` can never end, or -1. Needs the lock.
  int vanished_peer(const Message& message) const;

  /// Ends all messages with the group's failure. Expects the lock, and releases it for the callbacks.
  void end_all(std::unique_lock<std::mutex>& lock);

  void run_background();

  std::shared_ptr<NodeSession> session_;
  std::mutex mutex_;
  MessageQueue queue_;    // guarded by mutex_
  int drivers_ = 0;       // guarded by mutex_: threads in wait(); the background thread stands back meanwhile
  bool closing_ = false;  // guarded by mutex_
  std::condition_variable wake_background_;
  std::atomic<bool> pause_background_{false};
  std::thread background_;  // started under mutex_
};

std::shared_ptr<PointToPoint> make_node_point_to_point(std::shared_ptr<NodeSession> session);

}  // namespace ours
