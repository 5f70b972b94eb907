#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/callback.h"
#include "backend/stop_record.h"
#include "backend/work.h"
#include "common/deadline.h"
#include "common/interrupts.h"
#include "common/patrol.h"

namespace ours {

class CollectiveWork;
class StragglerLedger;

/// Runs the collectives of a lane one after another, in the order in which they were submitted. A collective runs on
/// the caller's thread if the caller would wait for it anyway and nothing is queued before it, or on a thread that
/// waits for a collective while no thread runs one, or otherwise on a comm thread. Comm threads start when they are
/// needed, and share the ownership of the queue, so that it can be dropped on any thread without joining them.
///
/// To wake a thread takes longer than a short collective. So the caller's thread begins such a one, with what its peers
/// need, and the thread that waits for it ends it. A comm thread, which wakes from time to time meanwhile, ends it if
/// nobody has come to wait.
///
/// Callbacks run on the thread that ran their Work, in the order of their Works, and may overlap. That thread leaves
/// the queue to others meanwhile, so that a callback may wait for any other collective.
class CommQueue : public std::enable_shared_from_this<CommQueue> {
 public:
  using WorkPtr = c10::intrusive_ptr<CollectiveWork>;

  /// `ledger` gets all collectives. `affinity`: the cores of the comm threads; empty leaves the choice to
  /// the system. `niceness` is added to that of the thread that starts them.
  CommQueue(std::shared_ptr<StragglerLedger> ledger, std::vector<int> affinity, int64_t niceness)
      : ledger_(std::move(ledger)), affinity_(std::move(affinity)), niceness_(niceness) {}

  /// What the caller of submit() does next.
  enum class Next {
    Waits,   ///< for the Work, which may run here
    RunsIt,  ///< if nothing is before it; the Work waits for nobody
    GoesOn,
  };
  /// Numbers the Work, and runs or queues it.
  void submit(const WorkPtr& work, Next next);

  /// Returns once the Work is done, and runs queued Works meanwhile. Returns false if `timeout` (0: none) passed first.
  bool wait(const CollectiveWork& work, std::chrono::milliseconds timeout);

  /// Lets a comm thread end what has only begun: somebody needs it without waiting here.
  void attend();

  /// Returns once nothing is queued or running, and no callback runs except the caller.
  void drain();

  /// Waits for at most `limit` until nothing is queued or running. Runs nothing itself, since it could not stop in
  /// time.
  void wait_idle(std::chrono::milliseconds limit);

  /// Ends what has begun, if that neither waits nor runs foreign code. Returns whether something is still queued or
  /// running.
  bool busy();

  /// Lets the comm threads end after what is queued. submit() must not be called afterwards.
  void stop();

  /// Called after stop(): waits for at most `limit` until the comm threads have ended. Returns at once on a comm
  /// thread, and in a signal handler that has interrupted a Work, which they wait for.
  void wait_stopped(std::chrono::milliseconds limit);

  StragglerLedger& ledger() const { return *ledger_; }
  StopRecord& stops() { return stops_; }

  uint64_t last_sequence() const { return sequence_.load(std::memory_order_relaxed); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  struct ThreadRole {
    const CommQueue* serves = nullptr;  ///< it is a comm thread of this queue
    const CommQueue* calls = nullptr;   ///< it runs the callbacks of a Work of this queue
  };
  static ThreadRole& role();

  /// Runs a Work with the lock released, and its callbacks while other threads may run the next one. `awaited`: the
  /// program waits for it.
  void run(const WorkPtr& work, Lock& lock, bool awaited);
  void run_callbacks(CollectiveWork& work, Lock& lock);
  void run_next(Lock& lock);

  /// Whether this thread may run the next Work: no thread runs one, or this one does, in a hook that waits. A callback
  /// leaves that to other threads if there can be any: otherwise the next Work's callbacks would run inside it. Not in
  /// a signal handler, which may have interrupted a Work that this thread runs.
  bool may_run() const {
    if (in_signal_handler()) return false;
    return running_ ? runner_ == std::this_thread::get_id() : !in_callback() || no_thread_;
  }

  /// Whether the calling thread runs the callbacks of a Work, or a callback that ran as soon as it was attached.
  static bool in_callback() { return role().calls != nullptr || Callback::current() != nullptr; }

  /// Sleeps until something has changed, but not beyond `end` or the time of the next check for signals.
  void sleep(Lock& lock, Clock::time_point end);

  /// Gives a comm thread that is in a callback a moment to return and take what is queued.
  void await_returning_server(Lock& lock);

  /// The next Work, if it has begun and nobody runs it; or null.
  CollectiveWork* begun() const;
  /// Ends the next Work if it has begun, and this thread may do that before it submits another one.
  void end_begun(const CollectiveWork& before, Next next, Lock& lock);
  /// Lets this thread begin the Work, with nothing before it, and puts it into the queue. Returns whether there is
  /// nothing else to do.
  bool begin(const WorkPtr& work, Lock& lock);
  /// Whether a comm thread has to run what is queued.
  bool needs_server() const;
  void attend(const Lock& held);

  /// Wakes or starts a comm thread for the queue. Returns false if there is none and none can be started.
  bool call_server();
  void serve();

  const std::shared_ptr<StragglerLedger> ledger_;
  StopRecord stops_;
  const std::vector<int> affinity_;
  const int64_t niceness_;
  std::mutex mutex_;  // guards all below but sequence_
  std::condition_variable work_available_;
  std::condition_variable progress_;
  std::deque<WorkPtr> queue_;
  Patrol patrol_;  // of comm threads, for what has begun
  bool running_ = false;
  std::thread::id runner_;
  int calling_ = 0;  // Works whose callbacks are running
  int waiters_ = 0;
  bool stopping_ = false;
  int servers_ = 0;         // comm threads
  int idle_ = 0;            // comm threads that wait for work
  bool no_thread_ = false;  // the last attempt to start a comm thread failed
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace ours
