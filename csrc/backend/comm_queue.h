#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/callback.h"
#include "backend/work.h"
#include "common/deadline.h"

namespace ours {

class CollectiveWork;

/// Runs the collectives of one group one after another, in the order submitted. Who runs them: the caller, where it
/// will wait anyway and nothing is queued before; a thread that waits for one and finds nobody running; else a comm
/// thread, the first of which starts with the first Work that needs it. Comm threads share the ownership of the queue,
/// so the queue can be dropped on any thread without joining.
///
/// Callbacks run on the thread that ran their Work, which leaves the queue to others meanwhile: a callback may wait for
/// any other collective. Callbacks begin in the order of their Works, and may overlap; what they submit goes to another
/// queue (see callback.h).
class CommQueue : public std::enable_shared_from_this<CommQueue> {
 public:
  using WorkPtr = c10::intrusive_ptr<CollectiveWork>;

  /// `affinity`: cores of the comm threads; empty leaves it to the system. `niceness` is added to that of the thread
  /// that starts them.
  CommQueue(std::vector<int> affinity, int64_t niceness) : affinity_(std::move(affinity)), niceness_(niceness) {}

  /// Numbers the Work and runs or queues it. `may_run_here`: the caller would wait for it next.
  void submit(const WorkPtr& work, bool may_run_here);

  /// Returns once the Work is done, running queued ones meanwhile; false if `timeout` (0: none) passed before.
  bool wait(const CollectiveWork& work, std::chrono::milliseconds timeout);

  /// Returns once nothing is queued or running, nor any callback but the caller.
  void drain();

  /// Waits until nothing is queued or running, at most for `limit`. Runs nothing itself: it could not stop then.
  void wait_idle(std::chrono::milliseconds limit);

  /// True while something is queued or running.
  bool busy() const;

  /// Lets the comm threads end after what is queued. submit() must not be called any more.
  void stop();

  /// After stop(): waits until the comm threads have ended, at most for `limit`, and not at all on one of them.
  void wait_stopped(std::chrono::milliseconds limit);

  /// Number of the last Work submitted.
  uint64_t last_sequence() const { return sequence_.load(std::memory_order_relaxed); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// What a thread is doing for a queue.
  struct Place {
    const CommQueue* serves = nullptr;  ///< it is a comm thread of this queue
    const CommQueue* calls = nullptr;   ///< it runs the callbacks of a Work of this queue
  };
  static Place& here();

  /// Runs one Work with the lock released, and its callbacks while others may run the next.
  void run(const WorkPtr& work, Lock& lock);
  void run_callbacks(CollectiveWork& work, Lock& lock);
  void run_next(Lock& lock);

  /// True where this thread may run the next Work: nobody does, or it does itself (a hook that waits). A callback
  /// leaves that to others, if there can be others: the next Work's callbacks would run inside it.
  bool may_run() const { return running_ ? runner_ == std::this_thread::get_id() : !in_callback() || no_thread_; }

  /// Whether the calling thread is in a callback of any Work: it runs those of one, or attached one that ran at once.
  static bool in_callback() { return here().calls != nullptr || Callback::current() != nullptr; }

  /// Sleeps until something has changed, until `end` at most, or for so long that it is time to ask for interrupts.
  void sleep(Lock& lock, Clock::time_point end);

  /// Gives a comm thread that is in a callback a moment to come back and take what is queued.
  void await_returning_server(Lock& lock);

  /// Sees to it that a comm thread looks at the queue. False if there is none and none can be started.
  bool call_server();
  void serve();

  const std::vector<int> affinity_;
  const int64_t niceness_;
  mutable std::mutex mutex_;  // guards all below but sequence_
  std::condition_variable work_available_;
  std::condition_variable progress_;
  std::deque<WorkPtr> queue_;
  bool running_ = false;
  std::thread::id runner_;
  int calling_ = 0;  // Works whose callbacks run
  int waiters_ = 0;
  bool stopping_ = false;
  int servers_ = 0;         // comm threads
  int idle_ = 0;            // of these, such as wait for work
  bool no_thread_ = false;  // the last attempt to start one failed
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace ours
