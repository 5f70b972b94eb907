#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "backend/work.h"

namespace ours {

class CollectiveWork;

/// Runs the collectives of one group one after another, in the order submitted. Who runs them: the caller, where it
/// will wait anyway and nothing is queued before; a thread that waits for one and finds nobody running; else the comm
/// thread, which starts with the first Work that needs it. It shares the ownership of the queue, so the queue can be
/// dropped on any thread without joining.
class CommQueue : public std::enable_shared_from_this<CommQueue> {
 public:
  using WorkPtr = c10::intrusive_ptr<CollectiveWork>;

  /// `affinity`: cores of the comm thread; empty leaves it to the system.
  explicit CommQueue(std::vector<int> affinity) : affinity_(std::move(affinity)) {}

  /// Numbers the Work and runs or queues it. `may_run_here`: the caller would wait for it next.
  void submit(const WorkPtr& work, bool may_run_here);

  /// Returns once the Work is done, running queued ones meanwhile; false if `timeout` (0: none) passed before.
  bool wait(const CollectiveWork& work, std::chrono::milliseconds timeout);

  /// Returns once nothing is queued or running.
  void drain();

  /// True while something is queued or running.
  bool busy() const;

  /// Lets the comm thread end after what is queued. submit() must not be called any more.
  void stop();

  /// After stop(): waits until the comm thread has ended, at most for `limit`. False if it has not, or if this is it.
  bool wait_stopped(std::chrono::milliseconds limit);

  /// Number of the last Work submitted.
  uint64_t last_sequence() const { return sequence_.load(std::memory_order_relaxed); }

 private:
  using Lock = std::unique_lock<std::mutex>;

  /// Runs one Work with the lock released.
  void run(const WorkPtr& work, Lock& lock);
  void run_next(Lock& lock);

  /// True where this thread may run the next Work: nobody does, or this thread does already (a callback that waits).
  bool may_run() const { return !running_ || runner_ == std::this_thread::get_id(); }

  void start_thread();
  void serve();

  const std::vector<int> affinity_;
  mutable std::mutex mutex_;  // guards all below but sequence_
  std::condition_variable work_available_;
  std::condition_variable progress_;
  std::deque<WorkPtr> queue_;
  bool running_ = false;
  std::thread::id runner_;
  int waiters_ = 0;
  bool stopping_ = false;
  bool thread_running_ = false;
  std::thread::id thread_;
  std::atomic<uint64_t> sequence_{0};
};

}  // namespace ours
