#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "collectives/messages/message_carrier.h"
#include "collectives/messages/point_to_point.h"
#include "common/interrupts.h"

namespace ours {

/// The messages of one rank, moved by a carrier: what is the same whatever carries them. Whoever posts a transfer tries
/// at once; what cannot complete is moved on by the thread that waits for it, or else by a background thread that is
/// started on first need, and another where that one is in a callback. These threads share the ownership, so that the
/// last user may drop this object on any thread, also in a callback, without joining them.
class PostedMessages final : public PointToPoint, public std::enable_shared_from_this<PostedMessages> {
 public:
  explicit PostedMessages(std::unique_ptr<MessageCarrier> carrier) : carrier_(std::move(carrier)) {}

  std::shared_ptr<Transfer> send(ConstSpan buffer, DType dtype, int dst, int tag, TransferLimitPtr limit,
                                 TransferDone done) override;
  std::shared_ptr<Transfer> recv(Span buffer, DType dtype, int src, int tag, TransferLimitPtr limit,
                                 TransferDone done) override;
  void wait(Transfer& transfer) override;
  bool busy() override;
  void close() noexcept override;
  bool wait_closed(std::chrono::milliseconds limit) override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  std::shared_ptr<Transfer> post(const std::shared_ptr<Message>& message);

  // What runs callbacks gets `counter`: where the calling thread is counted as one that moves messages (drivers_,
  // free_backgrounds_), or null. During callbacks, which may wait for other transfers, it is not.

  /// Moves all messages as far as they go and finishes those that ended. Returns whether anything happened. Expects
  /// `lock` to be held, and releases it for the callbacks.
  bool progress(Lock& lock, int* counter);

  /// Finishes the messages that ended, and then runs callbacks, one by one: each may wait for what the next completes,
  /// on another thread. In a callback it leaves them to others. Returns whether there were any. Expects `lock` to be
  /// held, and releases it for both.
  bool finish_ended(Lock& lock, int* counter);
  void run_callbacks(Lock& lock, int* counter);

  /// Moves messages, and rests while nothing moves, until stop() holds. stop() is called without the lock.
  template <class Stop>
  void drive(int* counter, Stop&& stop);
  /// Fails the messages where a signal handler of this thread raises.
  void heed(Interrupts& interrupts);

  /// Fails the group if a message's peer has died, or if somebody waits for a message whose peer has left or whose time
  /// is up. Returns whether the group has failed. Needs the lock.
  bool look_around();

  /// Lets the callbacks of a message's future run with an error if it is time to. Needs the lock.
  void tell_future(const Message& message, bool hopeless, const std::function<std::exception_ptr()>& error);

  /// Ends all messages with the group's failure. Expects the lock, and releases it for the callbacks.
  void end_all(Lock& lock, int* counter);

  bool idle() const { return carrier_->empty() && ended_.empty() && callbacks_.empty(); }

  /// Sees to it that another thread moves the messages and runs callbacks. False if none can be had.
  bool others_move();

  /// Sees to it that a background thread moves the messages. Throws std::system_error if none can be had.
  void call_background();

  /// The same for messages that nobody else would move: fails the group if no thread can be had. Expects the lock, and
  /// releases it for callbacks.
  void leave_to_background(Lock& lock);
  void run_background();

  const std::unique_ptr<MessageCarrier> carrier_;
  std::mutex mutex_;                         // guards all below but the flag, and what moves messages in the carrier
  Messages ended_;                           // their finish() has not been called
  std::deque<TransferCallbacks> callbacks_;  // of such as have ended, in their order
  int drivers_ = 0;                          // threads in wait(); the background thread stands back meanwhile
  bool closing_ = false;
  int backgrounds_ = 0;       // background threads
  int free_backgrounds_ = 0;  // of these, such as are not in callbacks
  std::set<std::thread::id> background_ids_;
  std::condition_variable wake_background_;
  std::condition_variable background_ended_;
  std::atomic<bool> pause_background_{false};
};

}  // namespace ours
