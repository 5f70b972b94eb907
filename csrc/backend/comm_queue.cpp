#include "backend/comm_queue.h"

#include <pthread.h>
#include <sched.h>

#include <system_error>

#include "backend/collective_work.h"
#include "common/background_thread.h"
#include "common/options.h"

namespace ours {

namespace {

void set_affinity(const std::vector<int>& cores) {
  if (cores.empty()) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int core : cores) CPU_SET(core, &set);
  if (const int error = ::pthread_setaffinity_np(::pthread_self(), sizeof(set), &set)) {
    TORCH_WARN("OURS_COMM_THREAD_AFFINITY names cores that cannot be used (", std::generic_category().message(error),
               "); it is ignored. Name cores that this process may run on");
  }
}

}  // namespace

void CommQueue::submit(const WorkPtr& work, bool may_run_here) {
  Lock lock(mutex_);
  work->set_sequence(sequence_.fetch_add(1, std::memory_order_relaxed) + 1);
  if (running_ && runner_ == std::this_thread::get_id()) {
    // From a callback of the Work that this thread has just run, which may go on to block on this one's future.
    queue_.push_back(work);
    while (!work->done() && !queue_.empty()) run_next(lock);
    return;
  }
  if (may_run_here && queue_.empty() && !running_) {
    run(work, lock);
    return;
  }
  if (!thread_running_) start_thread();
  queue_.push_back(work);
  if (!running_) work_available_.notify_one();
}

void CommQueue::run(const WorkPtr& work, Lock& lock) {
  const bool nested = running_;
  running_ = true;
  runner_ = std::this_thread::get_id();
  lock.unlock();
  work->execute();
  lock.lock();
  running_ = nested;
  if (waiters_ > 0) progress_.notify_all();
  if (!running_ && thread_running_ && (!queue_.empty() || stopping_)) work_available_.notify_one();
}

void CommQueue::run_next(Lock& lock) {
  WorkPtr work = std::move(queue_.front());
  queue_.pop_front();
  run(work, lock);
  // The last reference may go here, and with it tensors and callbacks of Python: not under the lock.
  lock.unlock();
  work.reset();
  lock.lock();
}

bool CommQueue::wait(const CollectiveWork& work, std::chrono::milliseconds timeout) {
  if (work.done()) return true;
  const bool bounded = timeout.count() > 0;
  const auto deadline = std::chrono::steady_clock::now() + (bounded ? timeout : std::chrono::milliseconds(0));
  Lock lock(mutex_);
  ++waiters_;
  while (!work.done()) {
    // A bounded wait does not run operations: it could not stop at its limit.
    if (!bounded && may_run() && !queue_.empty()) {
      run_next(lock);
      continue;
    }
    lock.unlock();
    const auto sleepy = std::chrono::steady_clock::now() + std::chrono::microseconds(options().yield_us);
    while (!work.done() && std::chrono::steady_clock::now() < sleepy) ::sched_yield();
    lock.lock();
    const auto woken = [&] { return work.done() || (!bounded && may_run() && !queue_.empty()); };
    if (!bounded) {
      progress_.wait(lock, woken);
    } else if (!progress_.wait_until(lock, deadline, woken)) {
      break;
    }
  }
  --waiters_;
  return work.done();
}

void CommQueue::drain() {
  Lock lock(mutex_);
  ++waiters_;
  while (!queue_.empty() || (running_ && runner_ != std::this_thread::get_id())) {
    if (may_run() && !queue_.empty()) {
      run_next(lock);
    } else {
      progress_.wait(lock);
    }
  }
  --waiters_;
}

bool CommQueue::busy() const {
  Lock lock(mutex_);
  return running_ || !queue_.empty();
}

void CommQueue::stop() {
  Lock lock(mutex_);
  stopping_ = true;
  work_available_.notify_all();
}

bool CommQueue::wait_stopped(std::chrono::milliseconds limit) {
  Lock lock(mutex_);
  if (thread_running_ && thread_ == std::this_thread::get_id()) return false;
  ++waiters_;
  const bool stopped = progress_.wait_for(lock, limit, [&] { return !thread_running_; });
  --waiters_;
  return stopped;
}

void CommQueue::start_thread() {
  start_background_thread("ours_comm", [self = shared_from_this()] { self->serve(); });
  thread_running_ = true;
}

void CommQueue::serve() {
  set_affinity(affinity_);
  Lock lock(mutex_);
  thread_ = std::this_thread::get_id();
  while (true) {
    work_available_.wait(lock, [&] { return !running_ && (!queue_.empty() || stopping_); });
    if (queue_.empty()) break;
    run_next(lock);
  }
  thread_running_ = false;
  progress_.notify_all();
}

}  // namespace ours
