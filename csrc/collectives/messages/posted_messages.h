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
#include "common/patrol.h"

namespace ours {

/// The messages of one rank, over any carrier. The thread that posts a transfer moves what it can at once. What is
/// left is moved by the threads that wait for transfers, or otherwise by a background thread, which is not woken for
/// each message, but looks after them from time to time; while it is in a callback, by another. Only background threads
/// run callbacks, if they can be started: these may wait for what the program's own threads do next. All share
/// the ownership, so that the last user may drop this object on any thread.
class PostedMessages final : public PointToPoint, public std::enable_shared_from_this<PostedMessages> {
 public:
  explicit PostedMessages(std::unique_ptr<MessageCarrier> carrier) : carrier_(std::move(carrier)) {}

  std::shared_ptr<Transfer> send(ConstSpan buffer, DType dtype, int dst, int tag, TransferLimitPtr limit,
                                 TransferDone done) override;
  std::shared_ptr<Transfer> recv(Span buffer, DType dtype, int src, int tag, TransferLimitPtr limit,
                                 TransferDone done) override;
  void wait(Transfer& transfer) override;
  void attend() override;
  void call(TransferCallbacks callbacks) override;
  void close() noexcept override;
  bool wait_closed(std::chrono::milliseconds limit) override;

 private:
  using Lock = std::unique_lock<std::mutex>;

  std::shared_ptr<Transfer> post(const std::shared_ptr<Message>& message);

  // Functions that run callbacks get `counter`, which counts the calling thread as one that moves messages (drivers_,
  // free_backgrounds_), or null. It is not counted during callbacks, which may wait for other transfers.

  /// Moves all messages as far as they go and finishes those that ended. Returns whether anything happened. Expects
  /// `lock` to be held, and releases it for the callbacks.
  bool progress(Lock& lock, int* counter);

  /// Finishes the messages that ended, and sees to it that the callbacks are run. Returns whether there were any.
  /// Expects `lock` to be held, and releases it for both.
  bool finish_ended(Lock& lock, int* counter);
  /// Runs callbacks one by one, since one may wait on another thread for what the next one completes.
  void run_callbacks(Lock& lock, int* counter);

  /// Moves messages, and rests while nothing moves, until stop() holds. stop() is called without the lock.
  template <class Stop>
  void drive(int* counter, Stop&& stop);
  /// Fails the messages if a signal handler of this thread raises an exception.
  void heed(Interrupts& interrupts);

  /// Fails the group if the peer of a message has died, or if a message that is waited for has lost its peer or run
  /// out of time. Returns whether the group has failed. Needs the lock.
  bool look_around();

  /// Lets the callbacks of a message's future run with an error if it is time to. Needs the lock.
  void tell_future(const Message& message, bool hopeless, const std::function<std::exception_ptr()>& error);

  /// Ends all messages with the group's failure. Expects the lock, and releases it for the callbacks.
  void end_all(Lock& lock, int* counter);

  bool idle() const { return carrier_->empty() && ended_.empty() && callbacks_.empty(); }

  /// Whether there is something that only a background thread does.
  bool needs_background() const { return !callbacks_.empty() || (is_left() && patrol_.is_due()); }
  /// Whether there are messages that no thread of the program's moves.
  bool is_left() const { return drivers_ == 0 && !idle(); }
  /// Wakes or starts a background thread. Throws std::system_error if none can be started.
  void call_background();

  /// Does the same, but fails the group if no thread can be started. Expects the lock, and releases it for callbacks.
  void wake_background(Lock& lock);
  /// Leaves messages to be moved soon, and sooner if some are long. `lay`: so had others been.
  void leave_to_background(Lock& lock, bool lay = false);
  /// Notes that messages are left. Returns whether a thread has to be woken for them.
  bool leave(bool lay = false);
  void run_background();

  const std::unique_ptr<MessageCarrier> carrier_;
  std::mutex mutex_;                         // guards all below but pause_background_, and the carrier's messages
  Messages ended_;                           // their finish() has not been called
  std::deque<TransferCallbacks> callbacks_;  // from messages that have ended, in their order
  size_t long_messages_ = 0;                 // those that are posted
  Patrol patrol_;
  int drivers_ = 0;  // threads in wait(); the background thread stands back meanwhile
  bool closing_ = false;
  int backgrounds_ = 0;       // background threads
  int free_backgrounds_ = 0;  // background threads that are not in callbacks
  std::set<std::thread::id> background_ids_;
  std::condition_variable wake_background_;
  std::condition_variable background_ended_;
  std::atomic<bool> pause_background_{false};
};

}  // namespace ours
